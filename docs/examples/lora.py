"""Trains LoRA adapters of peft over a frozen model of transformers, and saves a folder that peft loads.

python lora.py                                                 # a tiny random Llama on bytes learns this file
python lora.py --model /models/qwen3-0.6b --text my.txt        # your own: nothing is downloaded
torchrun --standalone --nproc_per_node=2 lora.py               # a half of the frozen weights on each rank
"""

import argparse

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dtrain

LENGTH, BATCH = 128, 4  # tokens of a sample; samples of a rank in a step


def base_model(folder):
    """Returns the model to adapt in BF16: frozen weights have no FP32 masters, so more digits would be lost."""
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, initializer_range=0.1, **sizes)).to(torch.bfloat16)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model of transformers with its tokenizer")
    parser.add_argument("--text", default=__file__, help="a text file; its last tenth is held out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="runs/lora", help="folder of the adapters")
    args = parser.parse_args()

    with open(args.text, encoding="utf-8") as file:
        text = file.read()
    encode = AutoTokenizer.from_pretrained(args.model, local_files_only=True).encode if args.model else str.encode
    tokens = torch.tensor(list(encode(text)))
    if len(tokens) < 20 * LENGTH:
        parser.error(f"--text {args.text} has {len(tokens)} tokens; expected {20 * LENGTH} or more")
    training, held_out = tokens.tensor_split([len(tokens) * 9 // 10])
    held_out = held_out.unfold(0, LENGTH, LENGTH)[:16]  # [samples, LENGTH]

    targets = "all-linear" if args.model else ".*(_proj|lm_head)"  # a random head has to learn too
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=targets)
    model = get_peft_model(base_model(args.model), lora)  # freezes the base; adapters are FP32
    model.config.use_cache = False
    engine = dtrain.initialize(
        model,
        optimizer=dtrain.AdamW(lr=3e-3, weight_decay=0.0),
        schedule=dtrain.Cosine(total_steps=args.steps),
        precision="bf16",  # of the products; the masters of the adapters are FP32
        zero_stage=3,  # shards the frozen weights over the ranks too
    )
    log = print if engine.rank == 0 else lambda _: None
    memory = {kind: size / 1e6 for kind, size in engine.memory().items()}
    log(f"each rank holds {memory['frozen']:.2f} MB of frozen weights, {memory['master']:.2f} MB of FP32 masters")

    def held_out_loss():
        with engine.eval():  # at stage 3 each forward needs all ranks, so all evaluate the same samples
            samples = held_out.to(engine.device)
            return engine(input_ids=samples, labels=samples).loss.item()

    before = held_out_loss()
    draws = torch.Generator().manual_seed(engine.rank)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(training) - LENGTH, (BATCH, 1), generator=draws)
        samples = training[starts + torch.arange(LENGTH)].to(engine.device)
        engine.backward(engine(input_ids=samples, labels=samples))  # takes an output that has a loss
        outcome = engine.step()
        if not outcome.applied:
            log(f"step {step} skipped ({outcome.reason}): {outcome.culprit}")
        elif step % 25 == 0:
            log(f"step {step}: loss {outcome.loss:.3f}")
    log(f"held-out loss {before:.3f} -> {held_out_loss():.3f}")

    masters = engine.master_state()  # of what was trained: whole FP32 tensors on rank 0; all ranks call
    if engine.rank == 0:
        model.save_pretrained(args.out, state_dict=masters, save_embedding_layers=False)
        loaded = PeftModel.from_pretrained(base_model(args.model), args.out).eval()
        with torch.no_grad():
            log(f"{args.out}: held-out loss {loaded(input_ids=held_out, labels=held_out).loss.item():.3f} in peft")


if __name__ == "__main__":
    main()
