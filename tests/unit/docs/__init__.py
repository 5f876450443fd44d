import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[3] / "docs/experiments"
sys.path += [str(SCRIPTS), str(SCRIPTS / "failures")]  # where python looks for what a script imports
