"""What the test suites of other trainers assert of a step, restated; importing this package registers them."""

from tests.corpus.rows import import_all

import_all(__name__)
