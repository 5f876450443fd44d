"""The built-in models of text: what both have in common, and the parts of the transformer.

tests/unit/checkpoint/huggingface/test_export.py holds their logits against transformers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dtrain.config.model import GPT2_FACTORY, ModelConfig
from dtrain.errors import ConfigError, ModelError
from dtrain.models import build_model, gpt2, train_flops_per_token, transformer
from dtrain.models.transformer import rotate, rotations
from dtrain.tasks import generate

SMALL = ModelConfig(num_layers=2, hidden_dim=32, num_heads=4, max_seq_len=16)
GROUPED = replace(SMALL, num_kv_heads=2)
OF_GPT2 = replace(SMALL, factory=GPT2_FACTORY)
VOCAB = 70
each_model = pytest.mark.parametrize("config", [SMALL, GROUPED, OF_GPT2], ids=["transformer", "grouped", "gpt2"])


def build(config: ModelConfig = SMALL, vocab_size: int = VOCAB, seed: int = 0) -> Any:
    return build_model(config, vocab_size, seed)


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@each_model
def test_shapes_and_a_first_loss_near_that_of_chance(config: ModelConfig) -> None:
    model = build(config)
    tokens, targets = random_tokens(8, 16), random_tokens(8, 16, seed=1)
    output = model(tokens, targets)
    assert (output.logits.shape, output.loss.shape) == ((8, 16, VOCAB), ())
    assert {output.logits.dtype, output.loss.dtype} == {torch.float32}
    assert abs(output.loss.item() - math.log(VOCAB)) < 0.2
    assert model(tokens).loss is None
    assert torch.equal(model(tokens=tokens, targets=targets).loss, output.loss)
    assert not list(model.buffers())
    assert isinstance(model.blocks, nn.ModuleList)
    with torch.device("meta"):
        loaded = build(config)
    loaded.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(loaded(tokens).logits, output.logits)
    nothing = model(tokens, torch.full_like(tokens, -100)).loss  # no target counts
    nothing.backward()
    assert nothing.item() == 0
    assert all((p.grad == 0).all() for p in model.parameters())


@each_model
def test_a_later_token_never_changes_earlier_logits(config: ModelConfig) -> None:
    model = build(config)
    tokens = random_tokens(2, 16)
    for position in (1, 9, 15):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % VOCAB
        with torch.no_grad():
            before, after = model(tokens).logits, model(changed).logits
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


@each_model
def test_dropout_is_active_in_training_only(config: ModelConfig) -> None:
    model = build(replace(config, dropout=0.5))
    tokens = random_tokens(2, 16)
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    assert torch.equal(model.eval()(tokens).logits, build(config).eval()(tokens).logits)


@pytest.mark.parametrize(
    ("build_own", "change", "message"),
    [
        (transformer.build, {"hidden_dim": 30}, r"model\.hidden_dim=30 is not a multiple of model\.num_heads=4"),
        (gpt2.build, {"hidden_dim": 30}, r"model\.hidden_dim=30 is not a multiple of model\.num_heads=4"),
        (transformer.build, {"num_kv_heads": 3}, r"model\.num_heads=4 is not a multiple of model\.num_kv_heads=3"),
        (transformer.build, {"hidden_dim": 36}, r"36 / 4 = 9 is odd, but rotary positions need an even head dim"),
    ],
)
def test_inconsistent_sizes_are_refused(build_own: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_own(replace(SMALL, factory="mine:build", **change), VOCAB)  # as a factory of yours may


@pytest.mark.parametrize("lengths", [(16,), (10, 2, 4)])
@each_model
def test_flops_agree_with_torchs_counter(config: ModelConfig, lengths: tuple[int, ...]) -> None:
    model = build(replace(config, ffn_dim=48), vocab_size=128)
    tokens = random_tokens(2, 16)
    positions = None if lengths == (16,) else torch.cat([torch.arange(length) for length in lengths]).repeat(2, 1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens, positions).loss.backward()
    context = sum(length**2 for length in lengths) / 16
    full_attention = 12 * 2 * 32 * context
    found = train_flops_per_token(replace(config, ffn_dim=48), 128, context)
    assert found is not None
    causal, full = found
    assert counter.get_total_flops() / tokens.numel() == full, "the counter knows no causality"
    assert full - causal == full_attention / 2
    assert train_flops_per_token(replace(config, factory="mine:build"), 257, 256) is None


@each_model
def test_ties_and_first_weights(config: ModelConfig) -> None:
    model, untied = build(replace(config, hidden_dim=256, num_layers=8)), build(replace(config, tie_embeddings=False))
    assert model.head.weight is model.embed.weight
    assert untied.head.weight.shape == untied.embed.weight.shape
    assert not torch.equal(untied.head.weight, untied.embed.weight)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == ("norm" in name and not name.endswith("bias"))).all(), name
        else:
            std = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name


def test_gpt2_has_its_own_sizes() -> None:
    """tests/unit/models/test_hf.py holds what it computes against transformers."""
    assert build(OF_GPT2).blocks[0].ffn.up.out_features == 128
    assert build(replace(OF_GPT2, ffn_dim=40)).blocks[0].ffn.up.out_features == 40
    sizes = replace(OF_GPT2, num_layers=12, hidden_dim=768, num_heads=12, max_seq_len=1024, vocab_size=50257)
    with torch.device("meta"):
        model = build(sizes)
    padding = (50304 - 50257) * 768
    assert sum(parameter.numel() for parameter in model.parameters()) - padding == 124_439_808


@pytest.mark.compile
def test_a_compiled_rotation_has_no_complex_numbers_and_the_same_bits() -> None:
    """Inductor compiles none of them: each would be a kernel that reads and writes all queries and keys."""
    dtypes: set[torch.dtype] = set()

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        values = tree_leaves([node.meta.get("example_value") for node in graph.graph.nodes])
        dtypes.update(value.dtype for value in values if isinstance(value, Tensor))
        return graph.forward

    x = torch.randn(2, 6, 3, 8).bfloat16().requires_grad_()
    rotation = rotations(torch.arange(6), 8, 10000.0)
    compiled, eager = torch.compile(rotate, backend=backend)(x, rotation), rotate(x, rotation)
    assert torch.equal(compiled, eager)
    (expected,) = torch.autograd.grad(eager.square().sum(), x)
    (gradient,) = torch.autograd.grad(compiled.square().sum(), x)
    assert torch.equal(gradient, expected)
    assert dtypes == {torch.bfloat16, torch.float32}


def test_rounded_angles_are_refused() -> None:
    rotation = rotations(torch.arange(6), 8, 10000.0).bfloat16()
    with pytest.raises(ModelError, match=r"rotary angles are torch\.bfloat16, expected float32.*cast_forward_inputs"):
        rotate(torch.zeros(1, 6, 2, 8), rotation)


def test_padded_vocabulary_is_never_predicted() -> None:
    model = build()
    assert model.head.weight.shape[0] == 128
    with torch.no_grad():
        model.head.weight[VOCAB:] = 100.0  # padding that would win everywhere if anything could see it
    tokens = random_tokens(2, 16)
    output = model(tokens, tokens)
    assert output.logits.shape[-1] == VOCAB
    output.loss.backward()
    assert model.head.weight.grad[VOCAB:].abs().max() == 0
    generated = generate(model, tokens, 20, SMALL.max_seq_len, torch.Generator().manual_seed(0))
    assert generated.max() < VOCAB
    assert build(vocab_size=128).head.weight.shape[0] == 128


def test_loss_is_the_mean_cross_entropy_of_the_targets_that_count() -> None:
    model = build()
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16, seed=1)
    targets[0, :10] = -100
    output = model(tokens, targets)
    counted = targets != -100
    logits = output.logits.double()[counted]
    terms = logits.logsumexp(-1) - logits[torch.arange(22), targets[counted]]
    torch.testing.assert_close(output.loss.double(), terms.mean(), rtol=1e-6, atol=0)


def test_initialization_depends_on_the_seed_alone_and_on_no_number_of_threads() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    again = build(seed=3).state_dict()
    torch.set_num_threads(threads)
    assert all(torch.equal(value, first[name]) for name, value in again.items())
    assert not torch.equal(build(seed=4).state_dict()["embed.weight"], first["embed.weight"])
    deeper = build(replace(SMALL, num_layers=5), seed=3).state_dict()
    same = "blocks.1.ffn.gate_up.weight"  # a weight keeps its values whatever else the model has
    assert torch.equal(deeper[same], first[same])


def test_generation_is_decided_by_its_generator_and_sees_the_last_tokens_only() -> None:
    model = build().eval()
    prompt = random_tokens(2, 3)
    seen = []

    def forward(tokens: Tensor) -> object:
        seen.append(tokens.shape[1])
        return model(tokens)

    first, again, other = (generate(forward, prompt, 10, 8, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (2, 13)
    assert torch.equal(first[:, :3], prompt)
    assert seen[:10] == [3, 4, 5, 6, 7, 8, 8, 8, 8, 8]
