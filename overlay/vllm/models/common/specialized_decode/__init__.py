# SPDX-License-Identifier: Apache-2.0
"""Specialised decode: kernels of a model's own for its decode steps, beside vLLM's path.

A step is *taken* when a model's kernels run it and *declined* when vLLM's path does. What a model's kernels
can run is a ``spec.DecodeSpec``; ``decode.SpecializedDecode`` owns the rest of their life. The
design document, docs/design/specialized_decode.md, shows how a model uses them.

The modules are imported one by one and this one imports none: ``vllm.config.kernel`` reads ``flags``, and
must not load the modules that read ``vllm.config``.
"""
