# SPDX-License-Identifier: Apache-2.0
"""Stands for the layer test's recorder where a test is about what surrounds it: a toy model's recordings.

``FAKE_LAYERS`` is what goes wrong in the arm with the kernels on.
"""

import os
import sys
import time
from pathlib import Path

from rocm_overlay.measure.layer_recorder import LayerRecorder
from tests.toy_layers import PROMPTS, STEPS, ToyModel, decode


def main():
    words = sys.argv[1:]
    on, fault = "--monokernel" in words, os.environ.get("FAKE_LAYERS", "")
    if on and fault == "fails":
        sys.exit("no GPU that runs this")
    if on and fault == "hangs":
        time.sleep(60)
    model = ToyModel(kernels=on and fault != "another path", scale=1.03 if on and fault == "scale" else 1.0)
    recorder = LayerRecorder(model, PROMPTS, STEPS)
    decode(model, steps=STEPS - (fault == "short"))
    return 1 if recorder.finish(Path(words[words.index("--out") + 1])) else 0


if __name__ == "__main__":
    sys.exit(main())
