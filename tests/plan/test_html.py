"""The page: well-formed, self-contained, with the figures, and harmless whatever the config holds."""

import dataclasses
from html.parser import HTMLParser

import pytest

from meshtrain.plan.estimate import estimate
from meshtrain.plan.facts import Cluster, MemoryPart
from meshtrain.plan.gpus import CARDS
from meshtrain.plan.html import COLOURS, render
from tests.plan.made_facts import FACTS, collective, made

VOID = {"meta", "br", "line"}
ESTIMATE = estimate(FACTS, CARDS["h100"])


class Page(HTMLParser):
    """Notes tags with their attributes, the text, and checks that every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def test_the_page_needs_nothing_beside_it() -> None:
    text = render(FACTS, ESTIMATE, ["a finding"])
    page = Page(text)
    for outside in ("http://", "https://", "src=", "href", "url(", "@import", "<script", "<link", "<img"):
        assert outside not in text
    assert len(page.of("svg")) == 3
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_the_figures_are_there() -> None:
    text = render(FACTS, ESTIMATE, ["gathered once per microbatch"])
    page = Page(text)
    for figure in (
        "2 x 8 h100", "1,000,000,000 parameters", "data=4 x model=4", "ZeRO stage 1", "65,536 tokens", "9.0 GB",
        "80.0 GB", "71.0 GB to spare", "activations", "our share", "reduce-scatter", "gathered once per microbatch",
        "96", "all-reduce (models/gpt.py:4)", "Estimated, not measured", "Compiled in 5.2 s",
    ):  # fmt: skip
        assert figure in page.text, figure
    assert "9,000,000,008 bytes" in text
    for line in ESTIMATE.assumptions:
        assert line in page.text


def test_what_the_config_gives_is_escaped() -> None:
    bad = '<script>alert("x")</script>'
    facts = made(
        cluster=Cluster(bad, 2, 8),
        mesh={bad: 4, "model": 4},
        compute=bad,
        memory=(MemoryPart(bad, 9_000_000_008, False),),
        collectives=(dataclasses.replace(collective("all-gather", bad, 4), source=bad, dtype=bad),),
    )
    shown = dataclasses.replace(ESTIMATE, assumptions=(bad,))
    text = render(facts, shown, [bad])
    page = Page(text)
    assert "<script" not in text
    assert page.of("script") == []
    assert page.text.count(bad) >= 8


def test_the_bar_is_as_long_as_the_parts() -> None:
    page = Page(render(FACTS, None))
    bars = [rect for rect in page.of("rect") if rect["height"] == "40.0" and rect["fill"] in COLOURS]
    assert [rect["width"] for rect in bars] == ["9.5", "19.0", "57.0"]  # of 760 for 80 GB
    (mark,) = page.of("line")
    assert mark["x1"] == "760.0"


def test_each_device_has_the_colour_of_its_node() -> None:
    page = Page(render(FACTS, None))
    squares = [rect["fill"] for rect in page.of("rect") if rect.get("rx") == "3"]
    assert squares == [COLOURS[0]] * 8 + [COLOURS[1]] * 8  # model across: two rows of 4 fill a node


def test_a_tall_mesh_lies_down() -> None:
    page = Page(render(made(mesh={"data": 8, "model": 2}), None))
    squares = [(rect["y"], rect["fill"]) for rect in page.of("rect") if rect.get("rx") == "3"]
    one_row = [COLOURS[0]] * 4 + [COLOURS[1]] * 4
    assert [fill for _, fill in squares] == one_row * 2
    assert len({y for y, _ in squares}) == 2


def test_a_large_mesh_is_condensed() -> None:
    facts = made(cluster=Cluster("h100", 128, 8), mesh={"data": 128, "model": 8})
    page = Page(render(facts, None))
    assert len([rect for rect in page.of("rect") if rect.get("rx") == "3"]) == 24 * 8
    assert "GPU 1023, node 127" in page.text
    assert "…" in page.text


def test_what_does_not_fit_is_said() -> None:
    text = Page(render(made(card_bytes=8_000_000_000), None)).text
    assert "Does not fit: peak 9.0 GB of 8.0 GB, 1.0 GB too much" in text


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_step_compiled_for_cpu_is_marked(platform: str) -> None:
    text = Page(render(made(platform=platform), None)).text
    assert ("virtual CPU devices" in text) == (platform == "cpu")
    assert ("a GPU's is not known" in text) == (platform == "cpu")


def test_one_device_without_communication() -> None:
    facts = made(cluster=Cluster("h100", 1, 1), mesh={"data": 1, "model": 1}, collectives=())
    page = Page(render(facts, None))
    assert len([rect for rect in page.of("rect") if rect.get("rx") == "3"]) == 1
    assert "None." in page.text
