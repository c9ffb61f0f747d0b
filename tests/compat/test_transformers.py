"""attn_implementation="tandem" against transformers' own eager attention, on tiny random models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (requirements/demo.txt)")

from tandem_attn import UnsupportedError  # noqa: E402
from tandem_attn.compat import transformers as compat  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # the name that every release from 4.56 on takes

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
ENCODER = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
SEQ2SEQ = {"vocab_size": 97, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
SEQ2SEQ |= {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
DECODERS = {
    "Llama": {},
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"sliding_window": 9, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "GptOss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
SEQLEN = 24
TOLERANCE = 1e-4  # on logits up to 5; eager computes in float32 whatever the model's type, so nothing finer can be compared


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    compat.register()


def build(kind: str, head: str, **config: Any) -> Any:
    """A random model whose attention is not nearly uniform, in eval mode."""
    torch.manual_seed(0)
    model = getattr(transformers, kind + head)(getattr(transformers, kind + "Config")(**config)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("sinks"):
                p.normal_()
            elif p.ndim > 1:
                p.mul_(8)
    return model


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Any:
    return build(request.param, "ForCausalLM", **SIZES, **DECODERS[request.param])


def logits(model: Any, implementation: str, **inputs: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def same_logits(model: Any, where: Tensor | None = None, **inputs: Any) -> None:
    """``where`` masks positions of padding, whose values mean nothing."""
    a, b = logits(model, "tandem", **inputs), logits(model, "eager", **inputs)
    error = (a - b).abs() * (1 if where is None else where[..., None])
    at = torch.unravel_index(error.argmax(), error.shape)
    assert error[at] <= TOLERANCE, f"logit {a[at]:g} instead of {b[at]:g} at {tuple(int(x) for x in at)}"
    assert b.abs().max() > 0.1  # it is about something


def tokens(batch: int = 3, seqlen: int = SEQLEN) -> Tensor:
    return torch.randint(3, 97, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> Tensor:
    mask = torch.ones(3, SEQLEN, dtype=torch.long)
    mask[0, :9] = 0
    mask[2, :3] = 0
    return mask if side == "left" else mask.flip(1)


def test_plain(decoder: Any) -> None:
    same_logits(decoder, input_ids=tokens())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(decoder: Any, side: str) -> None:
    mask = padding(side)
    same_logits(decoder, mask, input_ids=tokens(), attention_mask=mask)


def test_packed_position_ids(decoder: Any) -> None:
    positions = torch.cat([torch.arange(n) for n in (5, 11, 8)])[None]
    same_logits(decoder, input_ids=tokens(1), position_ids=positions, use_cache=False)


def test_packed_by_cu_seq_lens(decoder: Any) -> None:
    """transformers looks for packed position_ids only without a cache; with one, the mask is None or a window over the whole row."""
    ids, lens = tokens(1), (5, 11, 8)
    cu = torch.tensor([0, 5, 16, 24], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lens])[None]
    options = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 11, "max_length_k": 11, "use_cache": True}
    packed = logits(decoder, "tandem", input_ids=ids, position_ids=positions, **options)
    alone = torch.cat([logits(decoder, "eager", input_ids=part) for part in ids.split(lens, 1)], 1)
    assert (packed - alone).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None), (False, 3)])
def test_packed_window(causal: bool, window: int | None) -> None:
    """transformers' windows: j > i - window when causal, abs(i - j) <= window when bidirectional."""
    q, k = torch.randn(1, 4, 12, 8), torch.randn(1, 2, 12, 8)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    i, j = torch.arange(12)[:, None], torch.arange(12)
    seen = (i < 5) == (j < 5)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= (j > i - window) if causal else (i - j).abs() <= window
    module = layer(is_causal=causal)
    packed, _ = compat.attention_forward(module, q, k, k, None, sliding_window=window, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    masked, _ = compat.attention_forward(module, q, k, k, seen[None, None])
    assert (packed - masked).abs().max() <= 1e-5


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_with_left_padding(decoder: Any, cache: str | None) -> None:
    inputs = {"input_ids": tokens(), "attention_mask": padding("left"), "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    answers = []
    for implementation in ("tandem", "eager"):
        decoder.set_attn_implementation(implementation)
        answers.append(decoder.generate(**inputs, cache_implementation=cache))
    assert torch.equal(*answers)


@pytest.mark.parametrize("split", [1, 5, SEQLEN - 1])
def test_cache_filled_in_two_steps(decoder: Any, split: int) -> None:
    decoder.set_attn_implementation("tandem")
    ids = tokens()
    whole = decoder(input_ids=ids).logits
    first = decoder(input_ids=ids[:, :split], use_cache=True)
    second = decoder(input_ids=ids[:, split:], past_key_values=first.past_key_values).logits
    assert (torch.cat((first.logits, second), 1) - whole).abs().max() <= TOLERANCE


def test_static_cache_prefill(decoder: Any) -> None:
    ids, out = tokens(), []
    for implementation in ("tandem", "eager"):
        decoder.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=decoder.config, max_cache_len=SEQLEN + 8)
        with torch.no_grad():
            prompt = decoder(input_ids=ids[:, :20], past_key_values=cache).logits
            step = decoder(input_ids=ids[:, 20:21], past_key_values=cache).logits
        out.append(torch.cat((prompt, step), 1))
    assert (out[0] - out[1]).abs().max() <= TOLERANCE


def test_training_gradients(decoder: Any) -> None:
    ids, mask = tokens(), padding("left")
    labels = ids.masked_fill(mask * mask.roll(1, 1) == 0, -100)  # a padding row attends to nothing here, to everything in eager
    grads = []
    for implementation in ("tandem", "eager"):
        decoder.set_attn_implementation(implementation)
        decoder.train()
        decoder.zero_grad()
        decoder(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        grads.append({name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None})
    decoder.eval()
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        error = (grads[0][name] - grad).abs().max()
        assert error <= TOLERANCE * max(1.0, float(grad.abs().max())), f"{name}: {error:g}"


def test_autocast_with_norms_on_queries_and_keys() -> None:
    """Under autocast Qwen3's norms give queries and keys in float32, its projection values in bfloat16."""
    model = build("Qwen3", "ForCausalLM", **SIZES)
    with torch.autocast("cpu", torch.bfloat16):
        a, b = (logits(model, name, input_ids=tokens()).float() for name in ("tandem", "eager"))
    assert (a - b).abs().max() < 0.05 * b.abs().max()


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_encoder(side: str | None) -> None:
    mask = None if side is None else padding(side)
    same_logits(build("Bert", "Model", **ENCODER), mask, input_ids=tokens(), attention_mask=mask)


def test_encoder_decoder_with_cross_attention() -> None:
    model = build("Bart", "ForConditionalGeneration", **SEQ2SEQ)
    same_logits(model, input_ids=tokens(), attention_mask=padding("right"), decoder_input_ids=tokens(seqlen=7))


def test_position_bias_with_gradients() -> None:
    model = build(
        "T5", "ForConditionalGeneration", vocab_size=97, d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6, decoder_start_token_id=0
    ).double()
    grads = []
    for implementation in ("tandem", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(input_ids=tokens(), attention_mask=padding("right"), labels=tokens(seqlen=7)).loss.backward()
        grads.append(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.clone())
    assert grads[1].abs().max() > 1e-4
    assert (grads[0] - grads[1]).abs().max() <= 1e-9  # T5 computes in its own type throughout


def test_custom_4d_mask(decoder: Any) -> None:
    seen = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    seen[12:, 2:5] = False
    additive = torch.zeros(1, 1, SEQLEN, SEQLEN, dtype=torch.float32).masked_fill(~seen, torch.finfo(torch.float32).min)
    same_logits(decoder, input_ids=tokens(), attention_mask=additive)
    boolean = logits(decoder, "tandem", input_ids=tokens(), attention_mask=seen[None, None])
    assert (boolean - logits(decoder, "eager", input_ids=tokens(), attention_mask=additive)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("padded", [False, True])
def test_model_compiles_without_a_graph_break(padded: bool) -> None:
    model = build("Llama", "ForCausalLM", **SIZES)
    model.set_attn_implementation("tandem")
    inputs = {"input_ids": tokens(), "use_cache": False} | ({"attention_mask": padding("left")} if padded else {})
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits
        assert (compiled - model(**inputs).logits).abs().max() <= TOLERANCE


def test_attention_dropout_in_training_is_refused_and_eval_works() -> None:
    model = build("Llama", "ForCausalLM", **SIZES, attention_dropout=0.1)
    same_logits(model, input_ids=tokens())
    model.set_attn_implementation("tandem")
    with pytest.raises(UnsupportedError, match=r"dropout=0.1.*attention_dropout=0.0 in the model's config"):
        model.train()(input_ids=tokens())


def layer(**attributes: Any) -> Any:
    return type("Layer", (), attributes)()


Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)


def test_mask_longer_than_the_keys_with_position_bias() -> None:
    mask, position_bias = torch.randn(2, 1, 5, 9), torch.randn(1, 4, 5, 5)
    out, weights = compat.attention_forward(layer(is_causal=True), Q, K, K, mask, position_bias=position_bias, scaling=0.5)
    k = K.repeat_interleave(2, 1)
    expected = torch.softmax(Q @ k.transpose(2, 3) * 0.5 + mask[..., :5] + position_bias, -1) @ k
    assert weights is None
    assert (out - expected.transpose(1, 2)).abs().max() <= 1e-5


def test_empty_places_of_a_static_cache_are_not_read() -> None:
    k = torch.cat((K, torch.full((2, 2, 3, 8), float("nan"))), 2)
    out, _ = compat.attention_forward(layer(is_causal=True), Q, k, k, None)
    expected, _ = compat.attention_forward(layer(is_causal=True), Q, K, K, None)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"output_attentions": True}, UnsupportedError, "attention weights"),
        ({"sinks": torch.ones(2, 4, 5, 1)}, UnsupportedError, "sinks that differ between tokens"),
        ({"attention_mask": torch.ones(2, 5)}, ValueError, "^attention_mask must have 4 dimensions"),
        ({"attention_mask": torch.ones(2, 1, 5, 3)}, ValueError, "^attention_mask must have seqlen_k = 5"),
        ({"s_aux": torch.ones(3)}, ValueError, "^s_aux must have shape"),
        ({"scaling": "1"}, TypeError, "^scaling must be a number"),
        ({"cu_seq_lens_q": torch.tensor([0, 5], dtype=torch.int32)}, ValueError, "^cu_seq_lens_q describes sequences packed in one row"),
    ],
)
def test_wrong_calls(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compat.attention_forward(layer(is_causal=True), Q, K, K, **({"attention_mask": None} | options))


def test_registration_arguments() -> None:
    with pytest.raises(ValueError, match=r"^backend must be one of"):
        compat.register(backend="fast")
    with pytest.raises(ValueError, match=r"^name must not be empty"):
        compat.register(name="")
    with pytest.raises(TypeError, match=r"^name must be a str"):
        compat.register(name=None)  # type: ignore[arg-type]
    compat.register(name="tandem_reference", backend="reference")
    model = build("Llama", "ForCausalLM", **SIZES)
    a, b = (logits(model, name, input_ids=tokens()) for name in ("tandem_reference", "eager"))
    assert (a - b).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("found", "words"), [("4.55.4", "found 4.55.4"), (None, "found none")])
def test_wrong_version_names_both(monkeypatch: pytest.MonkeyPatch, found: str | None, words: str) -> None:
    def version(name: str) -> str:
        if found is None:
            raise compat.importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(compat.importlib.metadata, "version", version)
    needed = re.escape(f"needs transformers >= {compat.OLDEST} (tested with {compat.TESTED}), {words}: pip install")
    with pytest.raises(ImportError, match=needed):
        compat.register()


def test_importing_tandem_loads_no_transformers() -> None:
    modules = ", ".join(f"tandem_attn.compat.{name}" for name in ("transformers", "flash_attn", "sdpa"))
    code = f"import sys, {modules}; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
