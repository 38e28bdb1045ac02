"""The one way through a backbone: the tokens of a batch in one row, without padding.

Always true:
- A token's hidden state depends on the tokens before it in its own sequence, and on nothing else in
  the row: not on its neighbours, nor on what fills the row up.
- Whether a model can be run so is not taken from its name: all its layers must have used the
  attention that keeps sequences apart, and the numbers must be those of the padded way. Others are
  padded, and nobody who asks for hidden states sees a difference but the time.

How it is run is execution (`ForwardSettings`): layers may be compiled, in which case rows have few
numbers of tokens, and their activations may be computed twice instead of being kept.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.context import Context, StageError
from stages.contracts.sharding import Sharding
from stages.data.batching import Batch, Packed, collate, to_device
from stages.engines.forward import attention
from stages.engines.forward.ulysses import group_of
from stages.engines.models.lora import unwrapped
from stages.engines.models.spread import SPREAD_PASS, decoder_layers

SIZES = 4
"""A compiled row has quarters of the budget, so that hardly anything is ever compiled twice. How
many sequences it has, and how long the longest is, only matters to the attention, which takes them
as they come."""
CHECKED = ([1, 2, 3], [4], [2, 1])
"""Sequences that both ways are compared on."""
_CALL = "_compiled_call_impl"
"""Where torch looks for what a layer is to be called by instead of its own code."""


@dataclass(frozen=True)
class ForwardSettings:
    """Settings of the forward pass. They change results by rounding at most."""

    compile: bool = False
    """Whether layers are compiled."""
    checkpoint_activations: bool = False
    """Whether a layer's activations are computed again in the backward pass, to save memory."""
    micro_tokens: int = 8192
    """The budget of a row, of which compiled rows have quarters."""


_settings: WeakKeyDictionary[Any, ForwardSettings] = WeakKeyDictionary()
_packable: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_layers: WeakKeyDictionary[Any, list[tuple[Any, Callable[..., Any]]]] = WeakKeyDictionary()


def configure_forward(model: Any, settings: ForwardSettings) -> None:
    """Run the model with these settings from now on."""
    if settings == _settings.get(unwrapped(model)):
        return
    if settings.compile:
        # Few sizes of rows, but several kinds of passes, share the code of a layer.
        torch._dynamo.config.recompile_limit = 64
    _settings[unwrapped(model)] = settings
    _layers.pop(unwrapped(model), None)


def settings_for(ctx: Context) -> ForwardSettings:
    """As the profile has it; layers whose weights DeepSpeed moves around are not compiled."""
    by_torch = ctx.sharding in (Sharding.NONE, Sharding.FSDP) and ctx.sequence_parallel == 1
    compiled = ctx.compile and by_torch
    return ForwardSettings(compiled, ctx.checkpoint_activations, ctx.micro_tokens)


def settings_of(model: Any) -> ForwardSettings:
    return _settings.get(unwrapped(model), ForwardSettings())


def backbone(plain: Any) -> Callable[..., Any]:
    """What runs the backbone: of a model that is spread, a method that gathers weights first."""
    run: Callable[..., Any] = getattr(plain, SPREAD_PASS, plain.base_model)
    return run


@contextmanager
def not_compiled(model: Any) -> Iterator[None]:
    """The model run as it is: what is compiled takes rows of many tokens only."""
    plain = unwrapped(model)
    settings = settings_of(plain)
    _settings[plain] = ForwardSettings()
    try:
        yield
    finally:
        _settings[plain] = settings


def hidden_states(model: Any, batch: Batch) -> Tensor:
    """[N, hidden] the last hidden state of every token, as in `batch.packed`."""
    plain = unwrapped(model)
    if plain not in _packable:
        _packable[plain] = _can_be_packed(plain, batch.ids.device)
    if not _packable[plain] or _drops_attention(plain):
        if group_of(plain):
            raise StageError(
                "sequence_parallel in the profile: the rows of this model "
                f"({plain.config.model_type}) cannot be packed, and so not be shared out: set it "
                "to 1"
            )
        return _padded(plain, batch)
    return _packed(plain, batch.packed)


def _padded(plain: Any, batch: Batch) -> Tensor:
    hidden: Tensor = backbone(plain)(
        input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False
    ).last_hidden_state
    return take(hidden.flatten(0, 1), batch.packed.at)


def _packed(plain: Any, packed: Packed, calls: list[int] | None = None) -> Tensor:
    """`calls` is for the attention."""
    settings, group = settings_of(plain), group_of(plain)
    row = _filled_up(packed, settings.micro_tokens) if settings.compile else packed
    own: Callable[[Tensor], Tensor] = lambda tokens: tokens  # noqa: E731
    if group is not None:
        row, own = _in_parts(row, group.size), group.own
    span = torch.empty(row.longest, 0)
    if settings.compile:
        for of_attention in (row.starts, span):
            torch._dynamo.maybe_mark_dynamic(of_attention, 0)
    with _layers_at(plain, settings):
        hidden: Tensor = backbone(plain)(
            input_ids=own(row.ids)[None],
            position_ids=own(row.positions)[None],
            # Four dimensions: a mask that is taken as it is. The attention looks at `sequences`.
            attention_mask=row.positions.new_zeros(1, 1, 1, 1),
            use_cache=False,
            sequences=attention.Sequences(row.starts, span, row.at, group, calls),
        ).last_hidden_state
    whole = hidden[0] if group is None else group.whole(hidden[0])
    return whole[: len(packed.ids)]


def _filled_up(packed: Packed, budget: int) -> Packed:
    """The row at one of the few sizes; what fills it up are sequences of zeros at its end."""
    num_tokens, num_sequences = len(packed.ids), len(packed.starts) - 1
    quantum = -(-budget // SIZES)
    size = -(-num_tokens // quantum) * quantum
    longest = packed.longest
    missing = size - num_tokens
    tail = torch.arange(missing, device=packed.ids.device)
    ends = (tail[: -(-missing // longest)] + 1) * longest
    return replace(
        packed,
        ids=torch.nn.functional.pad(packed.ids, (0, missing)),
        positions=torch.cat([packed.positions, tail % longest]),
        starts=torch.cat([packed.starts, (ends.clamp(max=missing) + num_tokens).int()]),
        at=torch.cat([packed.at, num_sequences * longest + tail]),
    )


def _in_parts(row: Packed, size: int) -> Packed:
    """The row with so many tokens that as many ranks share them evenly."""
    missing = -len(row.ids) % size
    if not missing:
        return row
    device, longest = row.ids.device, max(row.longest, missing)
    tail = to_device(torch.arange(missing), device)
    num_sequences = len(row.starts) - 1
    places = (row.at // row.longest) * longest + row.positions
    return replace(
        row,
        ids=torch.nn.functional.pad(row.ids, (0, missing)),
        positions=torch.cat([row.positions, tail]),
        starts=torch.cat([row.starts, row.starts[-1:] + missing]),
        longest=longest,
        at=torch.cat([places, num_sequences * longest + tail]),
    )


@contextmanager
def _layers_at(plain: Any, settings: ForwardSettings) -> Iterator[None]:
    """The model's layers run as the settings say; afterwards they are as they were."""
    if not settings.compile and not settings.checkpoint_activations:
        yield
        return
    if plain not in _layers:
        _layers[plain] = [(layer, _at(settings, layer)) for layer in decoder_layers(plain)]
    layers = _layers[plain]
    # Most have none of their own but that of their class, and are to have none afterwards: whoever
    # keeps models looks at all that a layer has.
    own = [(layer, vars(layer)[_CALL]) for layer, _ in layers if _CALL in vars(layer)]
    for layer, call in layers:
        setattr(layer, _CALL, call)
    try:
        yield
    finally:
        for layer, _ in layers:
            delattr(layer, _CALL)
        for layer, call in own:
            setattr(layer, _CALL, call)


def _at(settings: ForwardSettings, layer: Any) -> Callable[..., Any]:
    call: Callable[..., Any] = layer._call_impl
    if settings.compile:
        call = torch.compile(call, dynamic=False)
    if not settings.checkpoint_activations:
        return call

    def kept_small(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **options)
        return checkpoint(
            call, *args, use_reentrant=False, preserve_rng_state=layer.training, **options
        )

    return kept_small


def _drops_attention(plain: Any) -> bool:
    """Whether attention is being dropped out, which the variable-length kernels cannot."""
    config = plain.config.get_text_config()
    shares = (getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop"))
    return plain.training and any(shares)


@torch.no_grad()
def _can_be_packed(plain: Any, device: Any) -> bool:
    config: Any = getattr(plain, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa" or not _is_plainly_causal(config):
        return False
    batch = collate([row[:1] for row in CHECKED], [row[1:] for row in CHECKED], 0, device)
    training = plain.training
    plain.eval()
    right = False
    try:
        expected = _padded(plain, batch)
        attention.register()
        plain.set_attn_implementation(attention.NAME)
        calls: list[int] = []
        packed_states = _packed(plain, batch.packed, calls)
        used = len(calls) == config.get_text_config().num_hidden_layers
        right = used and bool(_close(packed_states, expected))
    except Exception as error:
        # Whatever a model's own code makes of a packed row, it can still be padded.
        print(f"note: a {config.model_type} model is padded, not packed: {error}", file=sys.stderr)
    finally:
        plain.train(training)
        if not right:
            plain.set_attn_implementation("sdpa")
    return right


def _is_plainly_causal(config: Any) -> bool:
    """Whether the config speaks of nothing but attention to all tokens before."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return set(kinds) == {"full_attention"}
    odd = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping")
    return not any(getattr(text, name, None) for name in odd)


def _close(actual: Tensor, expected: Tensor) -> Tensor:
    """Whether the two differ by rounding; weights that are not numbers are not its business."""
    bound = 0.05 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-3
    actual, expected = actual.double().nan_to_num(), expected.double().nan_to_num()
    return (actual - expected).abs().max() <= bound * expected.abs().max()


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.num_rows = len(rows)
        return rows.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.num_rows, *gradient.shape[1:]).index_copy_(
            0, at, gradient
        ), None


def take(rows: Tensor, at: Tensor) -> Tensor:
    """`rows[at]` where no row is taken twice: its gradient needs no sums, which may not repeat."""
    taken: Tensor = _Take.apply(rows, at)  # type: ignore[no-untyped-call]
    return taken
