from __future__ import annotations

import sys
from pathlib import Path

# where python looks for what a script imports
SCRIPTS = Path(__file__).parents[3] / "docs/experiments"
sys.path += [str(SCRIPTS), str(SCRIPTS / "failures")]
