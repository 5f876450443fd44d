"""Silent faults that users of other trainers have published, by subject; importing this package registers them."""

from tests.corpus.rows import import_all

import_all(__name__)
