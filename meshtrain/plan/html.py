"""The report as one page that needs nothing beside it: pictures are inline SVG, no script, no request to anywhere.

Path("plan.html").write_text(render(facts, estimate, findings))
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from meshtrain.layout import show_bytes
from meshtrain.plan.estimate import Estimate, ring_bytes
from meshtrain.plan.facts import Facts

WIDTH = 760  # of every picture, in SVG units
MAX_SIDE = 32  # devices drawn along one side of the mesh; more are left out between the first and the last
# Eight hues that stay apart for the colour-blind (Okabe and Ito 2008), and on light and dark ground alike.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1", "#a6761d")
_LIGHT = {"#e69f00", "#cc79a7", "#56b4e9"}  # of these; text on them is dark
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fcfcfa; --faint: #6b6b6b; --line: #d8d8d4; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e6e3; --paper: #17181a; --faint: #9a9a98; --line: #3a3b3d; --bad: #ff8a80; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 800px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p.note, li, caption { color: var(--faint); } li.finding { color: var(--ink); } .bad { color: var(--bad); }
div.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; } td, th { padding: .25rem .8rem .25rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.faint { fill: var(--faint); } svg text.on { fill: #fff; } svg text.dark { fill: #111; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 2px; }
"""


def render(facts: Facts, estimate: Estimate | None, findings: Sequence[object] = ()) -> str:
    """The page.

    Args:
        facts: of the compiled step.
        estimate: of its time; None leaves that part out.
        findings: what the report flags, each as its text.
    """
    body = "\n".join(_body(facts, estimate, findings))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_title(facts))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _title(facts: Facts) -> str:
    cluster = facts.cluster
    return f"Training step on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu}"


def _body(facts: Facts, estimate: Estimate | None, findings: Sequence[object]) -> Iterator[str]:
    mesh = " x ".join(f"{axis}={size}" for axis, size in facts.mesh.items())
    yield f"<h1>{escape(_title(facts))}</h1>"
    yield (
        f"<p>{facts.params:,} parameters &middot; mesh {escape(mesh)} &middot; ZeRO stage {facts.stage} &middot; "
        f"{facts.microbatches} microbatch{'es' * (facts.microbatches > 1)} &middot; {facts.tokens:,} tokens per update "
        f"&middot; {escape(facts.compute)}</p>"
    )
    if facts.platform == "cpu":
        yield (
            "<p class='bad'>Compiled on virtual CPU devices: state and the collectives over data are exact, "
            "temporaries are not a GPU's.</p>"
        )
    if findings:
        yield "<h2>To look at</h2><ul>"
        yield from (f'<li class="finding">{escape(str(finding))}</li>' for finding in findings)
        yield "</ul>"
    yield from _memory(facts)
    yield from _mesh(facts)
    yield from _communication(facts)
    if estimate is not None:
        yield from _time(estimate)
    yield f'<p class="note">Compiled in {facts.compile_seconds:.1f} s.</p>'


# ---------------------------------------------------------------- memory


def _memory(facts: Facts) -> Iterator[str]:
    yield "<h2>Memory per GPU</h2>"
    yield f"<p>{_verdict(facts)}</p>"
    yield _memory_picture(facts)
    total = max(facts.peak_bytes, 1)
    rows = [
        [
            f'<span class="swatch" style="background:{_colour(i)}"></span>{escape(part.name)}',
            _exact(part.bytes),
            f"{100 * part.bytes / total:.1f} %",
            "our share of the compiler's sum" if part.estimated else "",
        ]
        for i, part in enumerate(facts.memory)
    ]
    rows.append(["<b>peak</b>", f"<b>{_exact(facts.peak_bytes)}</b>", "", ""])
    yield _table(["part", "bytes", "of the peak", ""], rows, numeric=(1, 2))


def _verdict(facts: Facts) -> str:
    peak = show_bytes(facts.peak_bytes)
    if facts.fits is None:
        return f"The peak here is {peak}; a GPU's is not known."
    room = facts.card_bytes - facts.peak_bytes
    if facts.fits:
        return f"Fits: peak {peak} of {show_bytes(facts.card_bytes)}, {show_bytes(room)} to spare."
    return (
        f'<b class="bad">Does not fit</b>: peak {peak} of {show_bytes(facts.card_bytes)}, {show_bytes(-room)} too much.'
    )


def _memory_picture(facts: Facts) -> str:
    """One bar of the parts, and a mark where the card ends."""
    whole = max(facts.peak_bytes, facts.card_bytes, sum(part.bytes for part in facts.memory), 1)
    shapes, x = [_rect(0, 8, WIDTH, 40, "none", stroke="var(--line)")], 0.0
    for i, part in enumerate(facts.memory):
        width = WIDTH * part.bytes / whole
        shapes.append(_rect(x, 8, width, 40, _colour(i), title=f"{part.name}: {show_bytes(part.bytes)}"))
        if width > 7 * len(part.name):
            shapes.append(_text(x + 5, 32, part.name, _on(i)))
        x += width
    if facts.card_bytes:
        end = WIDTH * facts.card_bytes / whole
        shapes.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="2" y2="54" stroke="var(--ink)" stroke-width="2"/>')
        shapes.append(_text(end, 70, f"card {show_bytes(facts.card_bytes)}", anchor="end" if end > 200 else "start"))
    shapes.append(_text(0, 70, "0", "faint"))
    return _svg(76, shapes, "memory by part, against the card")


# ---------------------------------------------------------------- the mesh


def _mesh(facts: Facts) -> Iterator[str]:
    cluster = facts.cluster
    yield "<h2>Mesh</h2>"
    yield (
        f"<p>One square is a GPU, one colour a node of {cluster.gpus_per_node}. The number is the node; "
        "devices are counted along the last axis first.</p>"
    )
    yield _mesh_picture(facts)


def _mesh_picture(facts: Facts) -> str:
    """A grid of the last axis by all others, the longer side across; a side that is too long is cut in its middle."""
    sizes, names = list(facts.mesh.values()) or [1], list(facts.mesh)
    inner, outer = sizes[-1], math.prod(sizes[:-1])
    turned = outer > inner
    across, down = (_kept(outer), _kept(inner)) if turned else (_kept(inner), _kept(outer))
    labels = [_axis_label(names[-1:], inner), _axis_label(names[:-1], outer)]
    right, below = reversed(labels) if turned else labels
    side = min(30.0, (WIDTH - 130) / len(across))
    shapes = [_text(130, 14, f"{right} \u2192"), _text(0, 24 + side / 2 + 4, f"{below} \u2193")]
    for i, row in enumerate(down):
        for j, column in enumerate(across):
            x, y = 130 + j * side, 24 + i * side
            if row is None or column is None:
                shapes.append(_text(x + side / 2, y + side / 2 + 4, "\u2026", "faint", "middle"))
                continue
            device = column * inner + row if turned else row * inner + column
            shapes += _device(x, y, side, device, device // facts.cluster.gpus_per_node)
    return _svg(30 + len(down) * side, shapes, "devices by node")


def _device(x: float, y: float, side: float, device: int, node: int) -> Iterator[str]:
    yield _rect(x + 1, y + 1, side - 2, side - 2, _colour(node), title=f"GPU {device}, node {node}", radius=3)
    if side >= 18:
        yield _text(x + side / 2, y + side / 2 + 4, str(node), _on(node), "middle")


def _axis_label(names: Sequence[str], size: int) -> str:
    return f"{'+'.join(names)} = {size}" if names else ""


def _kept(size: int) -> list[int | None]:
    """Which of `size` rows are drawn; None stands for those left out."""
    if size <= MAX_SIDE:
        return list(range(size))
    half = 3 * MAX_SIDE // 8
    return [*range(half), None, *range(size - half, size)]


# ---------------------------------------------------------------- communication


def _communication(facts: Facts) -> Iterator[str]:
    yield "<h2>Communication per step and GPU</h2>"
    if not facts.collectives:
        yield "<p>None.</p>"
        return
    yield _communication_picture(facts)
    rows = [
        [
            escape(each.axis),
            escape(each.op),
            "?" if each.count is None else f"{each.count:,}",
            _exact(each.bytes),
            escape(each.dtype),
            "yes" if each.in_loop else "",
            escape(each.source),
        ]
        for each in sorted(facts.collectives, key=lambda each: -ring_bytes(each))
    ]
    yield _table(["axis", "kind", "times", "bytes each", "type", "in a loop", "from"], rows, numeric=(2, 3))


def _communication_picture(facts: Facts) -> str:
    """A bar per axis, cut by the kind of collective."""
    sent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for each in facts.collectives:
        sent[each.axis][each.op] += ring_bytes(each)
    ops = sorted({op for kinds in sent.values() for op in kinds})
    most = max(max(sum(kinds.values()) for kinds in sent.values()), 1)
    shapes, y = [], 4.0
    for axis, kinds in sorted(sent.items()):
        x = 110.0
        shapes.append(_text(0, y + 18, axis))
        for op, count in sorted(kinds.items()):
            width = (WIDTH - 220) * count / most
            shapes.append(
                _rect(x, y, width, 26, _colour(ops.index(op)), title=f"{op} over {axis}: {show_bytes(count)}")
            )
            x += width
        shapes.append(_text(x + 6, y + 18, show_bytes(sum(kinds.values()))))
        y += 36
    for i, op in enumerate(ops):
        shapes.append(_rect(110 + 150 * (i % 4), y + 20 * (i // 4), 10, 10, _colour(i)))
        shapes.append(_text(126 + 150 * (i % 4), y + 20 * (i // 4) + 10, op, "faint"))
    return _svg(y + 20 * math.ceil(len(ops) / 4), shapes, "bytes sent by axis and kind")


# ---------------------------------------------------------------- time


def _time(estimate: Estimate) -> Iterator[str]:
    yield "<h2>Time per step (estimate)</h2>"
    yield '<p class="note">Estimated, not measured.</p>'
    yield _table(["part", "estimate", "of what"], [[escape(cell) for cell in row] for row in estimate.rows()], (1,))
    yield '<p class="note">Assumed:</p><ul>'
    yield from (f"<li>{escape(line)}</li>" for line in estimate.assumptions)
    yield "</ul>"


# ---------------------------------------------------------------- pieces; what is given as text is escaped here


def _exact(count: int) -> str:
    return f'<span title="{count:,} bytes">{show_bytes(count)}</span>'


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _on(i: int) -> str:
    """The class of text on a colour."""
    return "dark" if _colour(i) in _LIGHT else "on"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int]) -> str:
    """Cells are HTML already."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="n"' if i in numeric else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{k}>{c}</{tag}>" for k, c in zip(kinds, cells, strict=True)) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>\n<thead>{line(heads, "th")}</thead>\n<tbody>{body}</tbody>\n</table></div>'


def _svg(height: float, shapes: Iterable[str], label: str) -> str:
    inner = "\n".join(shapes)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">\n{inner}\n</svg>'


def _rect(x: float, y: float, width: float, height: float, fill: str, **more: Any) -> str:
    title = f"<title>{escape(more['title'])}</title>" if "title" in more else ""
    stroke = f' stroke="{more["stroke"]}"' if "stroke" in more else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" fill="{fill}"'
        f'{stroke} rx="{more.get("radius", 0)}">{title}</rect>'
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
