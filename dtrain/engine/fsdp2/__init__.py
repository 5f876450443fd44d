from dtrain.engine.fsdp2.engine import build

__all__ = ["build"]
