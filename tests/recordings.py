"""Made-up recordings: a text encoder that is copied whole, a DiT whose blocks are streamed, and a VAE."""

from __future__ import annotations

from diffusers_omni_offload.streaming.recording import MemorySample, Span

MILLISECOND = 1e-3


def recording(
    blocks: int = 4,
    *,
    forwards: int = 3,
    compute: float = 10.0,
    copy: float = 14.0,
    gather: float = 0.0,
    resident: tuple[int, ...] = (),
) -> tuple[list[Span], list[MemorySample]]:
    """Spans and samples of a call with two slots; times in milliseconds, a copied byte takes a microsecond.

    The DiT's first forward begins at 30 ms, each has 5 ms before its blocks and 4 ms after them, and there is 1 ms
    between two.
    """
    spans = [_span("component", "text_encoder", 0, 30, 0), _span("copy", "text_encoder", 0, 25, -1)]
    samples = [MemorySample(0.0, 1 << 20)]
    now, copied = 30.0, 25.0
    done: list[float] = []
    for forward in range(forwards):
        begin, now = now, now + 5
        for block in range(blocks):
            path = f"transformer.blocks.{block}"
            if block not in resident:
                issued = max(copied, done[-2] if len(done) > 1 else 0.0)
                copied = issued + copy
                spans.append(_span("copy", path, issued, copied, forward))
                if gather:
                    spans.append(_span("gather", path, copied, copied + gather, forward))
                    copied += gather
                if copied > now:
                    spans.append(_span("wait", path, now, copied, forward))
                    now = copied
            spans.append(_span("compute", path, now, now + compute, forward))
            samples.append(MemorySample(now * MILLISECOND, (2 + block) << 20))
            now += compute
            done += [now] if block not in resident else []
        now += 4
        spans.append(_span("component", "transformer", begin, now, forward))
        now += 1
    spans.append(_span("component", "vae", now, now + 60, 0))
    return spans, samples


def _span(lane: str, name: str, begin: float, end: float, forward: int) -> Span:
    nbytes = round((end - begin) * 1000) if lane in ("copy", "gather") else 0
    return Span(lane, name, begin * MILLISECOND, end * MILLISECOND, nbytes, forward)  # type: ignore[arg-type]
