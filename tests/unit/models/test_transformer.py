from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtrain.config.model import ModelConfig
from dtrain.errors import ConfigError, ModelError
from dtrain.models import build_model, train_flops_per_token, transformer
from dtrain.models.transformer import Transformer, rotate, rotations
from dtrain.tasks import generate

SMALL = ModelConfig(num_layers=2, hidden_dim=32, num_heads=4, max_seq_len=16)
VOCAB = 70


def build(config: ModelConfig = SMALL, vocab_size: int = VOCAB, seed: int = 0) -> Transformer:
    model = build_model(config, vocab_size, seed)
    assert isinstance(model, Transformer)
    return model


def random_tokens(*shape: int, seed: int = 0, high: int = VOCAB) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def to_compute_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts weights to the compute dtype as an engine does; norms stay FP32 and have their inputs cast."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data = module.weight.data.to(dtype)
    return model


def test_shapes_and_dtypes() -> None:
    model = build()
    tokens = random_tokens(3, 16)
    output = model(tokens, tokens)
    assert output.logits.shape == (3, 16, VOCAB)
    assert output.loss.shape == ()
    assert {output.logits.dtype, output.loss.dtype} == {torch.float32}
    assert model(tokens).loss is None
    assert torch.equal(model(tokens=tokens, targets=tokens).loss, output.loss)
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    assert not list(model.buffers())
    assert isinstance(model.blocks, nn.ModuleList)


def test_an_untrained_model_is_near_the_uniform_loss() -> None:
    loss = build()(random_tokens(8, 16), random_tokens(8, 16, seed=1)).loss
    assert abs(loss.item() - math.log(VOCAB)) < 0.1


@settings(max_examples=15)
@given(st.integers(1, 15), st.sampled_from([1, 2, 4]))
def test_a_later_token_never_changes_earlier_logits(position: int, num_kv_heads: int) -> None:
    model = build(replace(SMALL, num_kv_heads=num_kv_heads))
    tokens = random_tokens(2, 16)
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :position], after[:, :position])
    assert not torch.equal(before[:, position], after[:, position])


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_query_attention_is_full_attention_with_repeated_heads(num_kv_heads: int) -> None:
    grouped, full = build(replace(SMALL, num_kv_heads=num_kv_heads)), build()
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith("qkv.weight")]:
        head = 32 // 4
        queries, keys, values = state[name].split((32, num_kv_heads * head, num_kv_heads * head))
        repeated = [
            w.unflatten(0, (-1, head)).repeat_interleave(4 // num_kv_heads, 0).flatten(0, 1) for w in (keys, values)
        ]
        state[name] = torch.cat((queries, *repeated))
    full.load_state_dict(state)
    tokens = random_tokens(2, 16)
    torch.testing.assert_close(grouped(tokens).logits, full(tokens).logits)


def test_attention_is_softmax_of_scaled_rotated_products() -> None:
    """The oracle: one layer written out with explicit masks, real rotation matrices and FP64."""
    attn = build().blocks[0].attn.double()
    x = torch.randn(1, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    qkv = (x @ attn.qkv.weight.T).view(6, 3, 4, 8)
    expected = torch.zeros(6, 4, 8, dtype=torch.float64)
    for h in range(4):
        q, k = (turn_by_matrices(qkv[:, i, h]) for i in range(2))
        scores = (q @ k.T / math.sqrt(8)).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        expected[:, h] = scores.softmax(-1) @ qkv[:, 2, h]
    got = attn(x, rotations(torch.arange(6), 8, 10000.0))
    torch.testing.assert_close(got[0], expected.flatten(1) @ attn.out.weight.T, rtol=1e-5, atol=1e-8)


def turn_by_matrices(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        for j in range(x.shape[1] // 2):
            angle = t * 10000.0 ** (-2 * j / x.shape[1])
            matrix = torch.tensor(
                [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=x.dtype
            )
            out[t, 2 * j : 2 * j + 2] = matrix @ x[t, 2 * j : 2 * j + 2]
    return out


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


def test_rotated_products_depend_on_distance_alone_and_keep_lengths() -> None:
    query, key = torch.randn(2, 1, 1, 1, 64, generator=torch.Generator().manual_seed(0))
    turned_queries, turned_keys = (
        rotate(x.expand(1, 100, 1, 64), rotations(torch.arange(100), 64, 10000.0))[0, :, 0] for x in (query, key)
    )
    products = turned_queries @ turned_keys.T
    for distance in (0, 1, 50):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)
    torch.testing.assert_close(turned_queries.norm(dim=-1), query.norm().expand(100))
    assert rotate(query.bfloat16(), rotations(torch.arange(1), 64, 10000.0)).dtype == torch.bfloat16


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = build(), build(replace(SMALL, tie_embeddings=False))
    assert tied.head.weight is tied.embed.weight
    assert untied.head.weight is not untied.embed.weight
    count = {model: sum(p.numel() for p in model.parameters()) for model in (tied, untied)}
    assert count[untied] - count[tied] == tied.embed.weight.numel()
    assert not torch.equal(untied.head.weight, untied.embed.weight)


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
    logits = output.logits.double()
    terms = [
        logits[b, t].logsumexp(-1) - logits[b, t, targets[b, t]]
        for b in range(2)
        for t in range(16)
        if targets[b, t] != -100
    ]
    assert len(terms) == 22
    torch.testing.assert_close(output.loss.double(), torch.stack(terms).mean(), rtol=1e-6, atol=0)


def test_a_batch_without_targets_that_count_has_loss_and_gradient_zero() -> None:
    model = build()
    loss = model(random_tokens(1, 4), torch.full((1, 4), -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_dropout_is_active_in_training_only() -> None:
    model = build(replace(SMALL, dropout=0.5))
    tokens = random_tokens(2, 16)
    torch.manual_seed(0)
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    plain = build().eval()
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_under_cpu_autocast_with_16_bit_weights_and_fp32_norms(dtype: torch.dtype, num_kv_heads: int) -> None:
    config = replace(SMALL, num_kv_heads=num_kv_heads)
    reference, model = build(config), to_compute_dtype(build(config), dtype)
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16, seed=1)
    with torch.autocast("cpu", dtype):
        output = model(tokens, targets)
    output.loss.backward()
    assert {output.logits.dtype, output.loss.dtype} == {torch.float32}
    expected = reference(tokens, targets).loss
    expected.backward()
    torch.testing.assert_close(output.loss, expected, rtol=2e-3, atol=0)
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert got.grad.dtype == (torch.float32 if "norm" in name else dtype)
        relative = (got.grad.float() - want.grad).norm() / want.grad.norm()
        assert relative < (0.03 if dtype == torch.bfloat16 else 0.005), name


def test_initialization_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(torch.equal(value, first[name]) for name, value in build(seed=3).state_dict().items())
    assert not torch.equal(build(seed=4).state_dict()["embed.weight"], first["embed.weight"])
    deeper = build(replace(SMALL, num_layers=5), seed=3).state_dict()
    same = "blocks.1.ffn.gate_up.weight"  # a weight keeps its values whatever else the model has
    assert torch.equal(deeper[same], first[same])


def test_every_weight_is_drawn_once_and_alike_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.Size] = []
    normal = Tensor.normal_

    def draw(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        drawn.append(values.shape)
        return normal(values, *args, **kwargs)

    expected = build(seed=3).state_dict()
    threads = torch.get_num_threads()
    monkeypatch.setattr(Tensor, "normal_", draw)
    monkeypatch.setattr(Tensor, "uniform_", lambda *_, **__: pytest.fail("a layer draws its own values"))
    torch.set_num_threads(3)
    try:
        model = build(seed=3)
    finally:
        torch.set_num_threads(threads)
    assert len(drawn) == sum(p.dim() > 1 for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_initialization_scales() -> None:
    model = build(replace(SMALL, hidden_dim=256, num_layers=8))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        std = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
        assert abs(parameter.std().item() / std - 1) < 0.03, name


def test_builds_on_meta_and_runs_after_loading() -> None:
    expected = build()
    with torch.device("meta"):
        model = build()
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu").load_state_dict(expected.state_dict())
    tokens = random_tokens(2, 16)
    assert torch.equal(model(tokens).logits, expected(tokens).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_dim": 30}, r"model\.hidden_dim=30 is not a multiple of model\.num_heads=4"),
        ({"num_kv_heads": 3}, r"model\.num_heads=4 is not a multiple of model\.num_kv_heads=3"),
        ({"hidden_dim": 36}, r"36 / 4 = 9 is odd, but rotary positions need an even head dimension"),
    ],
)
def test_inconsistent_sizes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transformer.build(replace(SMALL, factory="mine:build", **change), VOCAB)  # as a factory of yours may


def test_arguments_of_another_factory_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ModelConfig\.args\.depth is for a ModelConfig\.factory of your own"):
        build(replace(SMALL, args={"depth": 3}))


@pytest.mark.parametrize("lengths", [(16,), (10, 2, 4)])
def test_flops_agree_with_torchs_counter(lengths: tuple[int, ...]) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(SMALL, num_kv_heads=2, ffn_dim=48)
    model = build(config, vocab_size=128)
    tokens = random_tokens(2, 16)
    positions = None if lengths == (16,) else torch.cat([torch.arange(length) for length in lengths]).repeat(2, 1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens, positions).loss.backward()
    context = sum(length**2 for length in lengths) / 16
    full_attention = 12 * 2 * 32 * context  # the counter knows no causality: it counts the other half too
    expected = train_flops_per_token(config, 128, context) + full_attention / 2
    assert counter.get_total_flops() / tokens.numel() == expected


def test_flops_of_a_custom_factory_are_unknown() -> None:
    assert train_flops_per_token(replace(SMALL, factory="mine:build"), 257, 256) is None


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


def test_learns_to_copy() -> None:
    """A model that learns nothing passes all of the above: here the second half repeats the first."""
    torch.manual_seed(0)
    model = build(vocab_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        half = torch.randint(8, (16, 8))
        tokens = torch.cat((half, half), 1)
        targets = tokens.roll(-1, 1)
        targets[:, :8] = -100  # the first half and its end are chance
        targets[:, -1] = -100
        loss = model(tokens, targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3  # chance is ln 8 = 2.08
