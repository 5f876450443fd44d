"""Trains a classifier in a loop of one's own: micro-batches, skipped steps, checkpoints, resume, evaluation.

python own_loop.py --out runs/spirals
torchrun --standalone --nproc_per_node=2 own_loop.py --out runs/spirals

Stop it with Ctrl-C and start it again: it resumes at the next batch, also on another number of ranks.
"""

import argparse
import math
import signal
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import dtrain

BATCH, MICRO_BATCH = 256, 64  # samples a step, over all ranks; most samples a forward


def spirals(num_samples, seed):
    """Returns points [n, 2] of three noisy spirals, and the number of each point's spiral [n]."""
    draws = torch.Generator().manual_seed(seed)
    y = torch.arange(num_samples) % 3
    radius = torch.rand(num_samples, generator=draws).sqrt()
    angle = 5 * radius + y * 2 * math.pi / 3 + 0.15 * torch.randn(num_samples, generator=draws)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), y


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="runs/own_loop", help="folder of the checkpoints")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 3))
    engine = dtrain.initialize(
        model,
        optimizer=dtrain.AdamW(lr=1e-2, weight_decay=0.01),
        schedule=dtrain.Cosine(total_steps=args.steps),
        precision="bf16",
    )
    log = print if engine.rank == 0 else lambda _: None
    with suppress(dtrain.checkpoint.NoCheckpointError):  # damaged ones are an error: a run never restarts unnoticed
        engine.load(args.out)
    log(f"starts after step {engine.attempted_steps}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: engine.request_stop())  # the next step tells all ranks

    x, y = spirals(9999, seed=0)
    x[1234, 0] = math.nan  # as real data may have: a step with it is skipped on all ranks, and says so
    batches_per_epoch = math.ceil(len(x) / BATCH)
    while engine.attempted_steps < args.steps:
        # the counter is in the checkpoint; it counts skipped steps too, so it is the place in the data
        epoch, index = divmod(engine.attempted_steps, batches_per_epoch)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        batch = order.split(BATCH)[index]  # the last one of an epoch is smaller
        # every rank runs the same number of micro-batches, whose sizes may differ; for a rank without any sample, which
        # needs more than 15 ranks here, see RankBatches in image_folder.py
        rounds = math.ceil(len(batch) / (engine.world_size * MICRO_BATCH))
        own = batch.tensor_split(rounds * engine.world_size)[engine.rank :: engine.world_size]
        for micro_batch in engine.accumulate(own):
            logits = engine(x[micro_batch].to(engine.device))
            loss = cross_entropy(logits, y[micro_batch].to(engine.device))
            # a mean counts by its number of samples; nothing is divided by ranks or micro-batches
            engine.backward(loss, weight=len(micro_batch))
        outcome = engine.step()

        step = engine.attempted_steps
        if not outcome.applied:
            log(f"step {step} skipped ({outcome.reason}): {outcome.culprit}")
        elif step % 50 == 0:
            log(f"step {step}: loss {outcome.loss:.4f}, grad norm {outcome.grad_norm:.3f}, lr {outcome.lr:.1e}")
        if step % 100 == 0 or step == args.steps or outcome.stop_requested:
            log(f"saved {engine.save(args.out)}")
        if outcome.stop_requested:
            return

    x, y = (tensor[engine.rank :: engine.world_size].to(engine.device) for tensor in spirals(1000, seed=1))
    with engine.eval():
        counts = torch.stack([(engine(x).argmax(dim=1) == y).sum(), torch.tensor(len(y), device=engine.device)])
    if engine.world_size > 1:  # a single rank has no process group
        dist.all_reduce(counts)
    correct, total = counts.tolist()
    log(f"applied {engine.applied_steps} of {engine.attempted_steps} steps; held-out accuracy {correct / total:.3f}")


if __name__ == "__main__":
    main()
