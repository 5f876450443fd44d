from dtrain.engine.adapters.fsdp2.engine import build

__all__ = ["build"]
