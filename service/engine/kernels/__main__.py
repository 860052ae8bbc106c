"""`python -m service.engine.kernels [--all]`: compiles ahead of time what a server needs.

With `--all` also what is rarely needed, for images. Most is compiled when it is imported.
"""

import sys

import numpy as np

from service.engine.kernels import call_counts, fidelity, rescoring, search

COMPILED = (fidelity.answer, rescoring.rescore)  # by their import

call_counts.compiled_add_call()
if "--all" in sys.argv:
    search.answer_from(np.uint16)
