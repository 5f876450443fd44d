"""Random small models in random loops: plain FP32 torch against each engine, stage and number of ranks.

A case (``cases``) is a value: the parts of a model, the steps of a loop, the places that train it. ``run.difference``
trains it both ways and says where they differ. Hypothesis draws the cases and shrinks those that differ; the shrunk
case, which is printed, becomes a test in ``tests/corpus/test_fuzz.py``.
"""
