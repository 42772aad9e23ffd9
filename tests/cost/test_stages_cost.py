"""Flops and bytes of the stages, against counts over explicit matrix products."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import ModelShape
from hybridattn.core.stages import Batch, Segment
from hybridattn.cost.catalog import SHAPES, shape
from hybridattn.cost.stages_cost import ModelCost, batch_attention

LLAMA_8B = ModelCost(shape("llama3.1-8b"), "bf16")
shapes = st.builds(
    lambda layers, hidden, inner, kv, group, dim, vocab: ModelShape(
        "s", layers, hidden, inner, kv * group, kv, dim, vocab, 64
    ),
    *(st.integers(1, n) for n in (4, 64, 96, 4, 9, 32, 200)),
)


def gemms(s):
    """(inputs, outputs) of every matrix of a layer, QKV first."""
    qkv = (s.hidden_size, s.head_dim * (s.num_q_heads + 2 * s.num_kv_heads))
    rest = (
        (s.num_q_heads * s.head_dim, s.hidden_size),
        (s.hidden_size, 2 * s.intermediate_size),
        (s.intermediate_size, s.hidden_size),
    )
    return [qkv], list(rest)


@settings(deadline=None, max_examples=50)
@given(s=shapes, rows=st.integers(1, 300), dtype=st.sampled_from(["fp32", "bf16"]))
def test_linear_stages_are_the_sum_of_their_matrices(s, rows, dtype):
    cost, element = ModelCost(s, dtype), 4 if dtype == "fp32" else 2
    first, rest = gemms(s)
    for work, matrices in ((cost.pre(rows), first), (cost.post(rows), rest), (cost.linear(rows), first + rest)):
        assert work.flops == sum(2 * rows * i * o for i, o in matrices)
        assert work.num_bytes == element * sum(i * o + rows * (i + o) for i, o in matrices)
    assert cost.head(rows).flops == 2 * rows * s.vocab_size * s.hidden_size
    assert cost.linear(rows) is cost.linear(rows)


@settings(deadline=None, max_examples=50)
@given(q=st.integers(1, 40), before=st.integers(0, 60))
def test_causal_prefill_counts_each_pair_once(q, before):
    pairs = sum(before + i + 1 for i in range(q))
    assert LLAMA_8B.prefill_attention(q, before + q).flops == 4 * 32 * 128 * pairs


def test_a_prefill_of_one_token_is_a_decode_step():
    prefill, decode = LLAMA_8B.prefill_attention(1, 100), LLAMA_8B.decode_attention(1, 100)
    assert (prefill.flops, prefill.num_bytes) == (decode.flops, decode.num_bytes)


def test_bytes_per_token_of_known_models():
    assert LLAMA_8B.kv_token_layer_bytes == 4096
    assert LLAMA_8B.shape.kv_bytes_per_token("bf16") == 131_072
    assert shape("llama2-7b").kv_bytes_per_token("fp16") == 524_288
    assert shape("llama3.1-70b").kv_bytes_per_token("fp16") == 327_680
    assert LLAMA_8B.weight_bytes == pytest.approx(16.06e9, rel=1e-3)  # as published: 8.03 G parameters
    assert SHAPES["llama3.1-70b"].num_params == pytest.approx(70.55e9, rel=1e-3)


def test_decode_attention_reads_every_key_once():
    work = LLAMA_8B.decode_attention_of([1000, 3, 97])
    assert (work.rows, work.kv_tokens) == (3, 1100)
    assert work.num_bytes == 1100 * 4096 + 3 * (2 * 32 * 128 * 2 + 4096)
    assert work.flops == 4 * 32 * 128 * 1100
    narrow = ModelCost(LLAMA_8B.shape, "bf16", kv_dtype="int8").decode_attention(1, 1000)
    assert narrow.num_bytes == 1001 * 2048 + 2 * 32 * 128 * 2


def test_copies():
    assert LLAMA_8B.send_qkv(3).num_bytes == 3 * (32 + 2 * 8) * 128 * 2
    assert LLAMA_8B.fetch_output(3).num_bytes == 3 * 32 * 128 * 2
    assert LLAMA_8B.offload_kv(10).num_bytes == 10 * 4096
    assert LLAMA_8B.move_request(10).num_bytes == 10 * 131_072


class Someone:
    request_id, token_ids, num_prompt, blocks, tier, params = "r", [], 0, [], "gpu", None


def test_attention_of_a_step_is_that_of_its_segments():
    decode = Segment(Someone(), "gpu", 99, 1, True, False)
    chunk = Segment(Someone(), "cpu", 16, 16, False, True)
    work = batch_attention(LLAMA_8B, Batch((decode, decode, chunk)))
    expected = LLAMA_8B.attention(2, 200, [(16, 32)])
    assert (work.flops, work.num_bytes, work.kv_tokens) == (expected.flops, expected.num_bytes, expected.kv_tokens)


def test_ops_of_several_kernels():
    mixed = LLAMA_8B.attention(4, 400, [(16, 32), (8, 8)])
    assert [p.kind for p in mixed.parts] == ["decode_attention", "prefill_attention", "prefill_attention"]
    assert mixed.kv_tokens == 440
    assert LLAMA_8B.attention(4, 400).kind == "decode_attention"
    assert [p.kind for p in LLAMA_8B.first(5).parts] == ["other", "linear"]
    assert [p.kind for p in LLAMA_8B.last(5, 2).parts] == ["linear", "head"]
    assert LLAMA_8B.last(5, 0) is LLAMA_8B.post(5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LLAMA_8B.decode_attention(5, 4), "5 rows over 4 keys"),
        (lambda: LLAMA_8B.prefill_attention(0, 4), "0 tokens over 4 keys"),
        (lambda: LLAMA_8B.linear(-1), "rows must not be negative, got -1"),
        (lambda: LLAMA_8B.offload_kv(-2), "tokens must not be negative, got -2"),
        (lambda: LLAMA_8B.attention(0, 0), "at least one part"),
        (lambda: ModelCost(LLAMA_8B.shape, "fp4"), "dtype 'fp4' is unknown"),
        (lambda: shape("gpt-17"), "model shape 'gpt-17' is unknown; known are smollm2-135m"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
