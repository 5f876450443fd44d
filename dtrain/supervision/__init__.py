"""Ends a run that hangs: each rank keeps a record of its progress, and one process per host watches the records.

The watcher (``dtrain.supervision.watcher``) and what it decides by (``dtrain.supervision.hang``) import no torch.
"""
