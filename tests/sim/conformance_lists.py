# SPDX-License-Identifier: Apache-2.0
"""The opcodes that are not compared with the manual's pseudocode, each with the reason."""

# The interpreter stops at this word of their pseudocode, or they have none; a test holds each to it.
NOT_EVALUATED: dict[str, str] = {
    "v_accvgpr_mov_b32": "no pseudocode",
    "v_accvgpr_read_b32": "no pseudocode",
    "v_accvgpr_write_b32": "no pseudocode",
    "v_cvt_f32_bf8": "name SDWA_SRC0_SEL",
    "v_cvt_f32_fp8": "name SDWA_SRC0_SEL",
    "v_cvt_pk_bf8_f32": "name f32_to_bf8",
    "v_cvt_pk_fp8_f32": "name f32_to_fp8",
    "v_cvt_scalef32_pk_bf8_bf16": "name bf16_to_bf8_scale",
    "v_cvt_scalef32_pk_bf8_f32": "name f32_to_bf8_scale",
    "v_cvt_scalef32_pk_fp4_bf16": "name bf16_to_fp4_scale",
    "v_cvt_scalef32_pk_fp4_f32": "name f32_to_fp4_scale",
    "v_cvt_scalef32_pk_fp8_bf16": "name bf16_to_fp8_scale",
    "v_cvt_scalef32_pk_fp8_f32": "name f32_to_fp8_scale",
    "v_exp_f16": "field 0",
    "v_fma_mix_f32": "no pseudocode",
    "v_fma_mixhi_f16": "no pseudocode",
    "v_fma_mixlo_f16": "no pseudocode",
    "v_fmaak_f32": "name SIMM32",
    "v_fmamk_f32": "name SIMM32",
    "v_rcp_f16": "field 0",
    "v_rsq_f16": "field 0",
}

UNCHECKED: dict[str, str] = {
    # The division helpers: checked by whole divisions over the exponent range.
    "v_div_fmas_f32": "the text scales by 2^32, which does not undo v_div_scale_f32's 2^64",
    "v_div_scale_f32": "the text compares with DENORM as a value",
    "v_div_fixup_f32": "the text names UNDERFLOW_F32 and OVERFLOW_F32 without values",
    # These have an own statement in test_conformance.py.
    "v_cvt_pkrtz_f16_f32": "rounds toward zero by a mode variable",
    "v_fract_f32": "the text gives 1.0 for tiny negative sources; LLVM relies on a result below 1",
    "v_frexp_exp_i32_f32": "the text gives -126 for denormals; LLVM relies on the true exponent",
    "v_sin_f32": "no accuracy in the text",
    "v_cos_f32": "no accuracy in the text",
    "v_readlane_b32": "lane access has its own test",
    "v_readfirstlane_b32": "lane access has its own test",
    "v_writelane_b32": "lane access has its own test",
    "v_permlane16_swap_b32": "lane access has its own test",
    "v_permlane32_swap_b32": "lane access has its own test",
    "v_swap_b32": "lane access has its own test",
    "v_nop": "does nothing",
}
