"""Shows what a run will do; the same as ``dtrain plan``."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("dtrain") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
