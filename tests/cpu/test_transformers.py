# SPDX-License-Identifier: BSD-3-Clause
# Does a Hugging Face model give the same with fa's attention as with its own eager attention?
"""Tiny models with random weights, fp32 on the CPU; eager attention is the reference."""

from __future__ import annotations

import functools

import pytest
import torch

import fa
from fa.integrations.transformers import attention_forward, attention_mask, register

transformers = pytest.importorskip(
    "transformers", minversion="4.56", reason="transformers is not installed: pip install '.[test]'"
)

from fa.integrations.paged_cache import PagedCache  # noqa: E402  (needs transformers)

NAME = register()
VOCABULARY = 97


def tiny(kind: str = "Llama", **options):
    """A model of a few thousand weights with random, not tiny, weights."""
    config_class = getattr(transformers, kind + "Config")
    model_class = getattr(transformers, kind + "ForCausalLM")
    config = config_class(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            "initializer_range": 0.2,
            **options,
        }
    )
    torch.manual_seed(0)
    return model_class(config).eval()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.manual_seed(1))


def padding(lengths: list[int], columns: int, side: str) -> torch.Tensor:
    mask = torch.zeros(len(lengths), columns, dtype=torch.long)
    for row, length in zip(mask, lengths, strict=True):
        if side == "right":
            row[:length] = 1
        else:
            row[columns - length :] = 1
    return mask


def both(model, run):
    """run(model) with eager attention, then with fa's."""
    results = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        results.append(run(model))
    return results


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max().item()
    assert scale > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5 * scale)


@pytest.fixture
def calls(monkeypatch):
    """What reaches fa: a list of (function, positional, keyword arguments)."""
    seen = []

    def spy(name, function, *args, **kwargs):
        seen.append((name, args, kwargs))
        return function(*args, **kwargs)

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(fa, name, functools.partial(spy, name, getattr(fa, name)))
    return seen


@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_prefill_equals_eager(heads_k, calls):
    model = tiny(num_key_value_heads=heads_k)
    with torch.no_grad():
        expected, actual = both(model, lambda m: m(tokens(2, 33)).logits)
    assert_close(actual, expected)
    assert len(calls) == 2  # one for each layer, or the model did not use fa
    assert all(kwargs["causal"] for _, _, kwargs in calls)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("masked", [False, True])
def test_generation_equals_eager(cache, masked, calls):
    ids = tokens(2, 11)
    mask = padding([6, 11], 11, "left") if masked else torch.ones_like(ids)

    def run(model):
        result = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return result.sequences, torch.stack(result.logits)

    (expected, expected_logits), (actual, actual_logits) = both(tiny(), run)
    assert torch.equal(actual, expected)
    assert_close(actual_logits, expected_logits)
    assert len(calls) == 2 * 12


def generate(model, ids, mask, **options):
    result = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return result.sequences, torch.stack(result.logits)


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_generation_from_pages_equals_eager(kind, masked, page_size, calls):
    """The cache of fa, against eager attention with a dynamic one of transformers."""
    ids, model = tokens(2, 11), tiny(kind, **({"sliding_window": 7} if kind == "Mistral" else {}))
    mask = padding([6, 11], 11, "left") if masked else torch.ones_like(ids)
    caches = []

    def run(m):
        options = {"max_new_tokens": 12}
        if m.config._attn_implementation == NAME:
            caches.append(PagedCache(page_size))
            options["past_key_values"] = caches[0]
        return generate(m, ids, mask, **options)

    (expected, expected_logits), (actual, actual_logits) = both(model, run)
    assert torch.equal(actual, expected)
    assert_close(actual_logits, expected_logits)
    assert len(calls) == 2 * 12 and all("page_table" in kwargs for _, _, kwargs in calls)
    assert any("window_size" in kwargs for _, _, kwargs in calls) == (kind == "Mistral")
    (cache,) = caches
    assert cache.get_seq_length() == 22 and len(cache.layers) == 2
    for layer in cache.layers:  # no more pages than twice what the sequences need, and one
        needed = 2 * -(-22 // page_size)
        assert layer.keys.shape[1] == page_size and needed < len(layer.keys) <= 2 * needed + 2


def test_dynamic_static_and_paged_caches_give_the_same_tokens(calls):
    model, ids = tiny(), tokens(2, 9)
    model.set_attn_implementation(NAME)
    mask = padding([9, 4], 9, "left")
    results = [
        generate(model, ids, mask, max_new_tokens=8, **options)
        for options in (
            {"cache_implementation": "dynamic"},
            {"cache_implementation": "static"},
            {"past_key_values": PagedCache(4)},
        )
    ]
    for sequences, logits in results[1:]:
        assert torch.equal(sequences, results[0][0])
        assert_close(logits, results[0][1])
    assert len(calls) == 3 * 2 * 8


def test_beams_from_pages_equal_eager():
    model, ids = tiny(), tokens(2, 9)

    def run(m):
        options = {"max_new_tokens": 8, "num_beams": 3}
        if m.config._attn_implementation == NAME:
            options["past_key_values"] = PagedCache(4)
        return m.generate(ids, do_sample=False, **options)

    expected, actual = both(model, run)
    assert torch.equal(actual, expected)


def test_a_paged_cache_forgets_and_starts_again():
    model, ids = tiny(), tokens(2, 15)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = PagedCache(4)
        model(ids[:, :13], past_key_values=cache)
        for layer in cache.layers:
            layer.crop(-3)
        assert cache.get_seq_length() == 10
        assert_close(model(ids[:, 10:], past_key_values=cache).logits, whole[:, 10:])
        for layer in cache.layers:
            layer.batch_select_indices(torch.tensor([1]))
        step = model(ids[1:, :1], past_key_values=cache).logits
        longer = model(torch.cat([ids[1:], ids[1:, :1]], 1), use_cache=False).logits
        assert_close(step, longer[:, -1:])
        for layer in cache.layers:
            layer.crop(15)
            layer.batch_repeat_interleave(2)
        again = model(ids[1:, :1].expand(2, 1), past_key_values=cache).logits
        assert_close(again, step.expand(2, 1, -1))
        cache.reset()
        assert cache.get_seq_length() == 0
        assert_close(model(ids, past_key_values=cache).logits, whole)


def test_pages_in_the_wrong_hands_raise():
    model, ids = tiny(), tokens(2, 9)
    with torch.no_grad():
        with pytest.raises((RuntimeError, ValueError)):  # sdpa takes the pool for keys
            model(ids, past_key_values=PagedCache(9))
        model.set_attn_implementation(NAME)
        holes = torch.ones_like(ids)
        holes[0, 4] = 0
        with pytest.raises(NotImplementedError, match="padding between .* PagedCache"):
            model(ids, attention_mask=holes, past_key_values=PagedCache(4))
    with pytest.raises(NotImplementedError, match="append_kv.*gradient"):
        model(ids, past_key_values=PagedCache(4))
    with pytest.raises(ValueError, match="page_size: 0"):
        PagedCache(0)


def test_generation_without_mask_from_a_static_cache():
    model, ids = tiny(), tokens(1, 9)

    def run(m):
        cache = transformers.StaticCache(config=m.config, max_cache_len=32)
        with torch.no_grad():
            first = m(ids, past_key_values=cache).logits
            second = m(tokens(1, 4), past_key_values=cache).logits
        return torch.cat([first, second], 1)

    expected, actual = both(model, run)
    assert_close(actual, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_equals_eager(side, calls):
    model, ids = tiny(), tokens(4, 21)
    mask = padding([21, 1, 8, 17], 21, side)
    with torch.no_grad():
        expected, actual = both(model, lambda m: m(ids, attention_mask=mask).logits)
    assert_close(actual[mask.bool()], expected[mask.bool()])
    assert {name for name, _, _ in calls} == {"attention"}  # lengths, not copies


def test_a_sequence_of_padding_alone_does_no_harm():
    model, ids = tiny(), tokens(2, 9)
    mask = padding([0, 9], 9, "right")
    with torch.no_grad():
        expected, actual = both(model, lambda m: m(ids, attention_mask=mask).logits)
    assert actual.isfinite().all()
    assert_close(actual[1], expected[1])


def test_padding_between_the_tokens_equals_eager():
    model, ids = tiny(), tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[0, 3:7] = 0
    mask[1, 0] = mask[1, 9] = 0
    with torch.no_grad():
        expected, actual = both(model, lambda m: m(ids, attention_mask=mask).logits)
    assert_close(actual[mask.bool()], expected[mask.bool()])


def test_a_second_turn_after_right_padding_equals_eager():
    """Sq < Sk with holes: the new tokens stand after the padding of the first turn."""
    model, ids, more = tiny(), tokens(2, 8), tokens(2, 3)
    mask = padding([5, 8], 8, "right")

    def run(m):
        with torch.no_grad():
            cache = m(ids, attention_mask=mask, use_cache=True).past_key_values
            whole = torch.cat([mask, torch.ones_like(more)], 1)
            return m(more, attention_mask=whole, past_key_values=cache).logits

    expected, actual = both(model, run)
    assert_close(actual, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_of_a_padded_batch_equal_eager(side):
    model, ids = tiny(), tokens(3, 13)
    mask = padding([13, 4, 9], 13, side)
    # A row of padding predicts the first token of a left-padded sequence: no label for that one.
    predicted = mask.bool() & torch.cat([mask.new_ones(3, 1), mask[:, :-1]], 1).bool()
    labels = ids.masked_fill(~predicted, -100)

    def run(m):
        m.zero_grad()
        m(ids, attention_mask=mask, labels=labels).loss.backward()
        return [p.grad.clone() for p in m.parameters()]

    expected, actual = both(model, run)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-4 * e.abs().max().item() + 1e-7)


@pytest.mark.parametrize("lengths", [[19, 19], [5, 19]])
def test_sliding_window_equals_eager(lengths, calls):
    model, ids = tiny("Mistral", sliding_window=6), tokens(2, 19)
    mask = padding(lengths, 19, "left")
    with torch.no_grad():
        expected, actual = both(model, lambda m: m(ids, attention_mask=mask).logits)
    assert_close(actual[mask.bool()], expected[mask.bool()])
    assert calls[0][2]["window_size"] == (5, 0)
    expected, actual = both(
        model, lambda m: m.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    )
    assert torch.equal(actual, expected)


def test_softcap_and_alternating_windows_equal_eager(calls):
    model = tiny("Gemma2", sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=7)
    with torch.no_grad():
        expected, actual = both(model, lambda m: m(tokens(2, 17)).logits)
    assert_close(actual, expected)
    assert {kwargs["softcap"] for _, _, kwargs in calls} == {2.0}
    assert {"window_size" in kwargs for _, _, kwargs in calls} == {False, True}


def test_packed_sequences_equal_separate_ones(calls):
    model = tiny()
    model.set_attn_implementation(NAME)
    parts = [tokens(1, n) for n in (7, 1, 12)]
    positions = torch.cat([torch.arange(p.shape[1]) for p in parts])[None]
    with torch.no_grad():
        separate = torch.cat([model(p).logits for p in parts], 1)
        calls.clear()
        packed = model(torch.cat(parts, 1), position_ids=positions, use_cache=False).logits
    assert_close(packed, separate)
    assert calls[0][0] == "attention_varlen"
    assert calls[0][1][3].tolist() == [0, 7, 8, 20]


def test_cu_seq_lens_of_a_padding_free_collator():
    model = tiny()
    model.set_attn_implementation(NAME)
    parts = [tokens(1, n) for n in (5, 9)]
    bounds = torch.tensor([0, 5, 14], dtype=torch.int32)
    positions = torch.cat([torch.arange(p.shape[1]) for p in parts])[None]
    with torch.no_grad():
        separate = torch.cat([model(p).logits for p in parts], 1)
        packed = model(
            torch.cat(parts, 1),
            position_ids=positions,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=9,
            max_length_k=9,
        ).logits
    assert_close(packed, separate)


@pytest.mark.parametrize("side", ["left", "right"])
def test_bidirectional_model_equals_eager(side):
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    ids, mask = tokens(3, 15), padding([15, 2, 9], 15, side)
    with torch.no_grad():
        expected, actual = both(model, lambda m: m(ids, attention_mask=mask).last_hidden_state)
    assert_close(actual, expected)  # padding rows too: they see the tokens in both


@pytest.mark.parametrize("side", ["left", "right"])
def test_windows_to_both_sides_equal_eager(side, calls):
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        local_attention=8,
        global_attn_every_n_layers=2,
        initializer_range=0.2,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **dict.fromkeys(("cls_token_id", "sep_token_id"), 1),
    )
    torch.manual_seed(0)
    model = transformers.ModernBertModel(config).eval()
    ids, mask = tokens(3, 25), padding([25, 2, 14], 25, side)
    with torch.no_grad():
        expected, actual = both(model, lambda m: m(ids, attention_mask=mask).last_hidden_state)
    assert_close(actual[mask.bool()], expected[mask.bool()])
    assert {kwargs.get("window_size") for _, _, kwargs in calls} == {None, (4, 4)}


@pytest.mark.parametrize("side", ["left", "right"])
def test_encoder_and_decoder_equal_eager(side):
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        init_std=0.2,
        pad_token_id=0,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.BartModel(config).eval()
    inputs = {
        "input_ids": tokens(3, 15),
        "attention_mask": padding([15, 2, 9], 15, side),
        "decoder_input_ids": tokens(3, 7),
    }
    with torch.no_grad():
        expected, actual = both(model, lambda m: m(**inputs).last_hidden_state)
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Mistral", {"sliding_window": 6}),
        ("Gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 7}),
        ("Qwen3", {}),
        ("GptOss", {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_generation_from_static_caches_equals_eager(kind, options):
    """Sliding layers keep a window of the cache; GptOss has sinks."""
    ids, mask = tokens(2, 11), padding([6, 11], 11, "left")
    expected, actual = both(
        tiny(kind, **options),
        lambda m: m.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=9,
            do_sample=False,
            cache_implementation="static",
        ),
    )
    assert torch.equal(actual, expected)


def module_of(model):
    return model.model.layers[0].self_attn


def heads(seqlen: int = 5, dtype=torch.float32):
    generator = torch.manual_seed(2)
    shapes = [(1, 4, seqlen, 16), (1, 2, seqlen, 16), (1, 2, seqlen, 16)]
    return [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]


def test_views_reach_fa_without_copies_and_sinks_count(calls):
    q, k, v = heads()
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    out, weights = attention_forward(module_of(tiny()), q, k, v, None, scaling=0.3, s_aux=sinks)
    assert weights is None
    assert out.shape == (1, 5, 4, 16)
    assert [t.data_ptr() for t in calls[0][1]] == [t.data_ptr() for t in (q, k, v)]
    scores = 0.3 * q @ k.repeat_interleave(2, 1).transpose(2, 3)
    scores.masked_fill_(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    scores = torch.cat([scores, sinks[None, :, None, None].expand(1, 4, 5, 1)], -1)
    expected = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"position_bias": torch.zeros(1, 4, 5, 5)}, "position_bias"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "attention_mask: 4 dimensions"),
        ({"cache": object()}, "cache"),
    ],
)
def test_what_is_not_available_raises_by_name(options, words):
    with pytest.raises(NotImplementedError, match=words):
        attention_forward(
            module_of(tiny()), *heads(), **{"attention_mask": None, "scaling": 0.25, **options}
        )


def test_attention_weights_raise_through_the_model():
    model = tiny()
    model.set_attn_implementation(NAME)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model.eval()(tokens(1, 5), output_attentions=True)


def test_dropout_follows_the_generator_and_stops_in_evaluation():
    model = tiny(attention_dropout=0.5)
    model.set_attn_implementation(NAME)
    ids = tokens(1, 9)
    torch.manual_seed(1)
    first, second = (model.train()(ids, labels=ids).loss for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(model(ids, labels=ids).loss, first) and not torch.equal(first, second)
    first.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_mask_pattern_that_fa_does_not_know_raises():
    masking = transformers.masking_utils
    config = tiny().config
    config._attn_implementation = NAME
    arguments = {
        "config": config,
        "attention_mask": None,
        "or_mask_function": lambda b, h, q, k: k < 3,
    }
    embeddings = torch.zeros(1, 5, 64)
    with pytest.raises(NotImplementedError, match="mask pattern or_masks"):
        try:
            masking.create_causal_mask(inputs_embeds=embeddings, cache=None, **arguments)
        except TypeError:  # older names
            masking.create_causal_mask(inputs_embeds=embeddings, past_key_values=None, **arguments)
    chunked = masking.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int32))
    assert attention_mask(1, 4, 4, mask_function=chunked) is None  # one chunk holds every key
    with pytest.raises(NotImplementedError, match="chunks of 4 with 5 keys"):
        attention_mask(1, 5, 5, mask_function=chunked)


def test_masks_that_do_not_fit_raise():
    with pytest.raises(ValueError, match="3 columns for 5 positions"):
        attention_mask(1, 5, 5, attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"shape \(2, 5\) does not fit 1 sequences"):
        attention_forward(module_of(tiny()), *heads(), torch.ones(2, 5, dtype=torch.bool))
    model, ids = tiny("Mistral", sliding_window=3), tokens(1, 9)
    model.set_attn_implementation(NAME)
    holes = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 1]])
    with pytest.raises(NotImplementedError, match="sliding window"):
        model(ids, attention_mask=holes)


@pytest.mark.parametrize("name", ["flash_fa", "org/fa", "paged|fa", "", "sdpa", "eager"])
def test_names_with_another_meaning_are_refused(name):
    with pytest.raises(ValueError, match="name: "):
        register(name)


def test_compiled_model_equals_eager_attention():
    model, ids = tiny(), tokens(2, 10)
    mask = padding([10, 6], 10, "left")
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        model.set_attn_implementation(NAME)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        actual = compiled(ids, attention_mask=mask, use_cache=False).logits
    assert_close(actual[mask.bool()], expected[mask.bool()])


def test_compiled_decoding_from_a_static_cache_equals_eager_attention():
    model, ids, start = tiny(), tokens(2, 8), padding([5, 8], 8, "left")

    def run(name, call):
        model.set_attn_implementation(name)
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        positions = (start.cumsum(1) - 1).clamp(min=0)
        mask, logits = start, []
        with torch.no_grad():
            model(ids, attention_mask=start, position_ids=positions, past_key_values=cache)
            for step in range(2):
                mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
                positions = mask.sum(1, keepdim=True) - 1
                inputs = {"attention_mask": mask, "position_ids": positions}
                logits.append(call(ids[:, step : step + 1], past_key_values=cache, **inputs).logits)
        return torch.cat(logits, 1)

    expected = run("eager", model)
    assert_close(run(NAME, torch.compile(model, backend="eager", fullgraph=True)), expected)
