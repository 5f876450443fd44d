"""Trains a small GPT-2 on the bytes of a text with transformers' Trainer, on an engine of dtrain.

    python trainer_clm.py --output_dir out --text_file book.txt --max_steps 300
    torchrun --standalone --nproc_per_node=2 trainer_clm.py --output_dir out --bf16 --zero_stage 2

Ranks without a GPU need --use_cpu. The options are those of transformers' TrainingArguments and of ScriptArguments.
After an interruption, the same command with --resume True continues with equal bits.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

from dtrain.integrations.trainer import Trainer  # the first changed line: it was "from transformers import Trainer"


@dataclass
class ScriptArguments:
    text_file: str = __file__
    block_size: int = 64  # tokens a row
    hidden: int = 64
    layers: int = 2
    zero_stage: int = 0  # what is sharded over the ranks: 1 optimizer states, 2 also gradients, 3 also weights
    resume: bool = False


class Blocks(torch.utils.data.Dataset):
    """Rows of ``size`` bytes of a text; each byte is a token."""

    def __init__(self, text: bytes, size: int) -> None:
        self.tokens = torch.tensor(list(text[: len(text) // size * size])).view(-1, size)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def top_1(prediction) -> dict[str, float]:
    return {"top_1": float((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]).mean())}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses(arguments)
    set_seed(args.seed)
    text = Path(script.text_file).read_bytes()
    held_out = max(len(text) // 10, script.block_size)
    config = GPT2Config(
        vocab_size=256,
        n_positions=script.block_size,
        n_embd=script.hidden,
        n_layer=script.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        args,
        train_dataset=Blocks(text[:-held_out], script.block_size),
        eval_dataset=Blocks(text[-held_out:], script.block_size),
        compute_metrics=top_1,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        dtrain={"engine": "native", "zero_stage": script.zero_stage},  # the second one
    )
    trainer.train(resume_from_checkpoint=script.resume)
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()  # all ranks call; rank 0 writes whole FP32 weights
    trainer.save_state()
    trainer.accelerator.wait_for_everyone()

    model = AutoModelForCausalLM.from_pretrained(args.output_dir)  # without dtrain from here on
    if trainer.is_world_process_zero():
        prompt = torch.tensor([list(b"import ")])
        written = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[0].tolist()
        print(f"perplexity {metrics['perplexity']:.2f}; it writes: {bytes(written)!r}")
    trainer.end()
    return metrics


if __name__ == "__main__":
    main()
