"""Pictures of the documentation, drawn by code: python docs/pictures/draw.py

Boxes have a fill and a text color of their own, lines and free text a gray that is
readable on white and on black, so that one file serves light and dark pages.
"""

import html
import pathlib
from collections.abc import Callable

FOLDER = pathlib.Path(__file__).parent
LINE, TEXT = "#7d8590", "#1f2328"
BLUE, GREEN, AMBER, VIOLET, GRAY = "#cfe3ff", "#c9efd3", "#ffe2a8", "#e3d5ff", "#e6e9ee"
EDGE = {BLUE: "#4f8edc", GREEN: "#3f9d5a", AMBER: "#c98a1b", VIOLET: "#8a63d2"}


def box(x, y, width, height, text, fill=GRAY, size=16) -> str:
    """A rounded box with centered lines of text; the first one is bold."""
    lines = text.split("\n")
    top = y + height / 2 - (len(lines) - 1) * size * 0.6 + size * 0.35
    shape = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" '
        f'fill="{fill}" stroke="{EDGE.get(fill, LINE)}" stroke-width="1.5"/>'
    )
    words = [
        f'<text x="{x + width / 2}" y="{top + i * size * 1.2:.1f}" font-size="{size}" '
        f'text-anchor="middle" fill="{TEXT}" font-weight="{400 if i else 600}">'
        f"{html.escape(line)}</text>"
        for i, line in enumerate(lines)
    ]
    return "\n".join([shape, *words])


def note(x, y, text, anchor="middle", size=15) -> str:
    """Free text on the page's own background."""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{LINE}">{html.escape(text)}</text>'
    )


def arrow(*points) -> str:
    """A line through points (x, y) with a head at its end."""
    path = " L ".join(f"{x} {y}" for x, y in points)
    return (
        f'<path d="M {path}" fill="none" stroke="{LINE}" stroke-width="2" '
        'marker-end="url(#head)"/>'
    )


def picture(title, width, height, *parts) -> str:
    """The SVG of parts, with a title for screen readers."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="system-ui, sans-serif">\n<title>'
        f"{html.escape(title)}</title>\n"
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse">'
        f'<path d="M 0 0 L 10 5 L 0 10 z" fill="{LINE}"/></marker></defs>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def federated_round() -> str:
    """How a round flows, from the server and back to it."""
    clients = []
    for i, name in enumerate(("client 7", "client 31", "client 502")):
        y = 20 + 92 * i
        clients += [
            box(290, y, 190, 74, f"{name}\nS steps on its examples", GREEN, 15),
            arrow((222, 150), (286, y + 37)),
            arrow((482, y + 37), (546, 150)),
        ]
    return picture(
        "A round: the server samples a cohort, clients train, updates are aggregated",
        780,
        380,
        box(20, 100, 200, 100, "server\nglobal model\nsamples K of N clients", BLUE),
        *clients,
        note(385, 298, "all K train in one compiled call"),
        box(
            550,
            100,
            210,
            100,
            "aggregation\nclip, quantize, mean,\nnoise: a chain",
            AMBER,
        ),
        arrow((655, 204), (655, 345), (120, 345), (120, 206)),
        note(385, 336, "server update: model of the next round"),
        note(385, 368, "personal state stays with its client"),
    )


def lanes() -> str:
    """Where clients of a cohort train: devices, waves, lanes."""
    lengths = {
        (0, 0): (5, 5), (0, 1): (3, 2), (0, 2): (1, 1),
        (1, 0): (5, 4), (1, 1): (3, 3), (1, 2): (1, 0),
    }  # fmt: skip
    parts = []
    for device in range(2):
        top = 50 + 170 * device
        parts.append(box(10, top, 110, 120, f"device {device}\nits examples", BLUE, 15))
        x = 150
        for wave in range(3):
            steps = lengths[device, wave]
            width = 40 * max(*steps, 1) + 8
            parts.append(note(x + width / 2, top - 10, f"wave {wave}"))
            for lane, count in enumerate(steps):
                y = top + 60 * lane
                for step in range(count):
                    cell = box(x + 40 * step, y + 6, 36, 44, f"{step}", GREEN, 14)
                    parts.append(cell)
                if not count:
                    parts.append(box(x, y + 6, 40, 44, "idle", GRAY, 12))
            x += width + 16
        parts.append(note(570, top + 33, "lane 0", "start"))
        parts.append(note(570, top + 93, "lane 1", "start"))
        parts.append(arrow((640, top + 60), (706, 195)))
    parts.append(box(714, 150, 116, 90, "sum over\nclients\nthen finish", AMBER, 15))
    parts.append(note(330, 385, "numbers are steps of one client; waves are scanned,"))
    parts.append(note(330, 405, "lanes mapped (vmap), devices sharded (shard_map)"))
    title = "A cohort on two devices with two lanes each"
    return picture(title, 840, 420, *parts)


def chain() -> str:
    """Updates through the links of an aggregation, and the aggregate back."""
    names = ("clip by\nglobal norm", "quantize\n22 bits", "weighted\nmean")
    parts = [box(10, 40, 120, 70, "update\nof a client", GREEN, 15)]
    for i, name in enumerate(names):
        x = 170 + 165 * i
        parts += [box(x, 40, 125, 70, name, AMBER, 15)]
        parts += [arrow((x - 38, 75), (x - 4, 75))]
    parts += [
        note(395, 28, "summarize: for one client, inside its lane"),
        arrow((622, 75), (660, 75), (660, 121)),
        box(590, 125, 140, 56, "sum over clients", BLUE, 15),
        arrow((660, 184), (660, 235), (630, 235)),
    ]
    for i, name in enumerate(reversed(names)):
        x = 500 - 165 * i
        parts += [box(x, 200, 125, 70, name, AMBER, 15)]
        parts += [arrow((x - 4, 235), (x - 36, 235))]
    parts += [
        box(10, 200, 120, 70, "aggregate\nto the server", BLUE, 15),
        note(395, 296, "finish: once, with the sums"),
    ]
    return picture("An aggregation is a chain of links", 760, 310, *parts)


def personal() -> str:
    """Layers that all clients share, and layers that stay."""
    parts = [box(20, 120, 150, 80, "server\nshared layers", BLUE)]
    for i, name in enumerate(("client A", "client B", "client C")):
        y = 20 + 96 * i
        parts += [
            arrow((174, 160), (246, y + 37)),
            box(250, y, 190, 74, "shared layers\nsent each round", BLUE, 15),
            box(
                444, y, 190, 74, f"layers of client {name}\nnever leave it", VIOLET, 15
            ),
        ]
    return picture("Personalized layers", 660, 310, *parts)


def classes() -> str:
    """A softmax whose class vectors are sharded over devices."""
    parts = [box(20, 110, 150, 90, "backbone\nembeddings [B, D]", BLUE, 15)]
    for i in range(4):
        y = 15 + 74 * i
        parts += [
            arrow((174, 155), (236, y + 28)),
            box(
                240,
                y,
                230,
                56,
                f"device {i}\nclasses {i} M/4 to {i + 1} M/4",
                VIOLET,
                15,
            ),
            arrow((474, y + 28), (546, 155)),
        ]
    parts += [
        box(550, 105, 170, 100, "softmax\nsums of exponents\nover devices", AMBER, 15)
    ]
    return picture("Class-parallel softmax on four devices", 740, 320, *parts)


def fedfr() -> str:
    """The parts of FedFR: generic and personalized."""
    return picture(
        "FedFR: one generic network, a branch per client",
        760,
        330,
        box(20, 110, 150, 90, "face images\nof client k", GREEN, 15),
        box(210, 110, 150, 90, "backbone\nshared", BLUE, 15),
        box(410, 20, 160, 80, "CosFace head\nclasses of client k", VIOLET, 15),
        box(410, 120, 160, 80, "branch\nmodel of client k", VIOLET, 15),
        box(410, 220, 160, 80, "contrastive term\nold, global model", AMBER, 15),
        arrow((174, 155), (206, 155)),
        arrow((364, 145), (406, 60)),
        arrow((364, 155), (406, 160)),
        arrow((364, 165), (406, 260)),
        box(20, 225, 150, 80, "public identities\nhard negatives", GRAY, 15),
        arrow((174, 265), (240, 265), (240, 204)),
        note(585, 65, "generic recognition", "start"),
        note(585, 165, "personalized", "start"),
        note(585, 265, "keeps clients near", "start"),
    )


PICTURES: dict[str, Callable[[], str]] = {
    "round": federated_round,
    "lanes": lanes,
    "chain": chain,
    "personal": personal,
    "classes": classes,
    "fedfr": fedfr,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
