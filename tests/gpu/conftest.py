"""Settings of a process whose tests share one GPU."""

from __future__ import annotations

import os

# torch reads it once, in the first product on a GPU, and then refuses reproducible engines if it is not set
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
