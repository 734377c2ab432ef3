"""Draws the documentation's pictures: python docs/pictures.py"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
BOX = '<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="#444"/>'
TEXT = '<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
ARROW = '<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#444" marker-end="url(#tip)"{dash}/>'
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 400" font-family="sans-serif">
<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
<path d="M0,0 L10,5 L0,10 z" fill="#444"/></marker></defs>
<style>@media (prefers-color-scheme: dark) {
[fill="white"] { fill: #131416 } [fill="#222"] { fill: #ddd } [fill="#555"], [fill="#777"] { fill: #aaa }
[fill="#444"] { fill: #999 } [stroke="#444"] { stroke: #999 } [stroke="#999"] { stroke: #777 }
[fill="#eef3fa"] { fill: #1c2a3d } [fill="#fdf3e1"] { fill: #3a2e17 } [fill="#e9f6ea"] { fill: #1b3220 }
[fill="#f3ecf7"] { fill: #30233a } [fill="#f2f2f2"] { fill: #2a2b2d }
}</style>
<rect width="760" height="400" fill="white"/>"""  # noqa: E501


def box(x: int, y: int, w: int, title: str, *lines: str, fill: str = "#eef3fa") -> list[str]:
    height = 34 + 17 * len(lines)
    parts = [BOX.format(x=x, y=y, w=w, h=height, fill=fill)]
    parts.append(text(x + w // 2, y + 22, title, size=15))
    return parts + [text(x + w // 2, y + 42 + 17 * i, line, size=12, fill="#555") for i, line in enumerate(lines)]


def text(x: int, y: int, words: str, *, size: int = 12, anchor: str = "middle", fill: str = "#222") -> str:
    return TEXT.format(x=x, y=y, size=size, anchor=anchor, fill=fill, text=words)


def arrow(x1: int, y1: int, x2: int, y2: int, *, dashed: bool = False) -> str:
    return ARROW.format(x1=x1, y1=y1, x2=x2, y2=y2, dash=' stroke-dasharray="5 4"' if dashed else "")


def processes() -> str:
    parts = [HEAD]
    parts += box(20, 20, 200, "launcher", "your script or notebook", "never forked", fill="#fdf3e1")
    parts += box(290, 20, 200, "fork server", "torch imported once", "one per caller, stays warm")
    parts += box(290, 150, 200, "agent", "one per call", "supervises, hosts the store")
    for index, x in enumerate((170, 300, 430)):
        parts += box(x, 300, 110, f"rank {index}", "your function", "its own device", fill="#e9f6ea")
    parts += [arrow(220, 45, 290, 45), text(255, 38, "call")]
    parts += [arrow(390, 88, 390, 150), text(398, 122, "fork, per call", anchor="start")]
    parts += [arrow(375, 218, 250, 300), arrow(390, 218, 355, 300), arrow(420, 218, 485, 300)]
    parts += [text(390, 285, "fork, per rank", anchor="start", size=11)]
    parts += [arrow(290, 185, 120, 88, dashed=True), text(60, 150, "values (memory files),", anchor="start")]
    parts += [text(60, 166, "failures", anchor="start")]
    parts += [
        arrow(530, 300, 480, 218, dashed=True),
        text(530, 262, "meet at the store, join the group", anchor="start"),
    ]
    parts += [arrow(195, 300, 315, 218, dashed=True), text(180, 262, "answers (queue)")]
    return "\n".join([*parts, "</svg>\n"])


def machines() -> str:
    """Who talks to whom in a launch over two machines."""
    parts = [HEAD.replace("0 0 760 400", "0 0 760 450").replace('height="400"', 'height="450"')]
    for x, title in ((10, "machine with rank 0 (the master)"), (400, "another machine")):
        parts.append(f'<rect x="{x}" y="10" width="350" height="410" rx="10" fill="none" stroke="#999"/>')
        parts.append(text(x + 175, 34, title, size=15, fill="#555"))
    parts += box(40, 60, 130, "agent", "stops its ranks")
    parts += box(40, 160, 130, "link", "joins, heartbeats", "loopback for ranks")
    parts += box(210, 110, 130, "gate", "the public port", "and the store", fill="#fdf3e1")
    parts += box(590, 60, 130, "agent", "stops its ranks")
    parts += box(420, 160, 130, "link", "joins, heartbeats", "loopback for ranks")
    for x, rank in ((40, 0), (210, 1), (430, 2), (590, 3)):
        parts += box(x, 340, 120, f"rank {rank}", fill="#e9f6ea")
    parts += [arrow(105, 160, 105, 112), arrow(170, 180, 210, 140), arrow(170, 200, 210, 160, dashed=True)]
    parts += [arrow(420, 186, 340, 140), text(408, 64, "solid: control,", anchor="start")]
    parts += [
        text(408, 81, "dashed: all ranks'", anchor="start"),
        text(408, 98, "traffic with the store", anchor="start"),
    ]
    parts += [arrow(420, 200, 340, 155, dashed=True), arrow(550, 180, 600, 112)]
    parts += [arrow(100, 340, 100, 230), arrow(260, 340, 130, 230)]
    parts += [arrow(490, 340, 480, 230), arrow(650, 340, 520, 230)]
    parts.append(text(380, 439, "between the ranks: collectives, by NCCL or gloo", fill="#777"))
    parts.append(arrow(160, 365, 210, 365))
    parts.append(arrow(330, 365, 430, 365))
    parts.append(arrow(550, 365, 590, 365))
    return "\n".join([*parts, "</svg>", ""])


# From the first to fork to the last: a room imports only what stands below it.
ROOMS = (
    ("cli/", "the command: ps, stop, doctor", "the caller", "#fdf3e1"),
    ("caller/", "plan, start and drive a launch; output, report", "the caller", "#fdf3e1"),
    ("forkserver/", "imports torch once; forks an agent per call", "the fork server", "#eef3fa"),
    ("agent/", "forks, supervises and stops the ranks", "the agent", "#eef3fa"),
    ("rank/", "become a rank, answer calls, leave", "a rank", "#e9f6ea"),
    ("rendezvous/", "the store where ranks meet; addresses", "agent and ranks", "#f3ecf7"),
    ("core/", "hook points for features", "all of them", "#f2f2f2"),
    ("protocol/", "records, channels, memory files, pickling", "all of them", "#f2f2f2"),
    ("torch_parts/", "what torch does not document", "all of them", "#f2f2f2"),
    ("base/", "errors, Linux, words", "all of them", "#f2f2f2"),
)
STATIONS = (
    ("plan", "caller/launch/plan"),
    ("send", "caller/launch/start"),
    ("fork the agent", "forkserver/children"),
    ("join machines", "machines/agent"),
    ("fork the ranks", "agent/fork_ranks"),
    ("become a rank", "rank/function"),
    ("answer the call", "rank/function"),
    ("release, leave", "agent/supervisor"),
    ("settle", "caller/launch/settle"),
)


def rooms() -> str:
    """Where each line of code runs, and the stations of a call."""
    height = 96 + 46 * len(ROOMS)
    parts = [HEAD.replace("0 0 760 400", f"0 0 760 {height}").replace('height="400"', f'height="{height}"')]
    parts += [text(20, 26, "room", anchor="start", fill="#777"), text(400, 26, "runs in", anchor="start", fill="#777")]
    parts += [text(590, 26, "the life of a call", anchor="start", fill="#777")]
    for index, (name, what, where, fill) in enumerate(ROOMS):
        y = 36 + 46 * index
        parts.append(BOX.format(x=20, y=y, w=550, h=38, fill=fill))
        parts.append(text(32, y + 24, name, size=15, anchor="start"))
        parts.append(text(130, y + 24, what, anchor="start", fill="#555"))
        parts.append(text(412, y + 24, where, anchor="start", fill="#222"))
    for index, (name, module) in enumerate(STATIONS):
        y = 36 + 46 * index
        parts.append(text(600, y + 17, f"{index + 1}. {name}", size=13, anchor="start"))
        parts.append(text(616, y + 33, module, size=11, anchor="start", fill="#777"))
    parts += [arrow(12, 50, 12, 36 + 46 * len(ROOMS) - 14)]
    parts.append(text(20, height - 34, "The arrow: imports. A module imports from its own room and from those below.",
                      anchor="start", fill="#555"))  # fmt: skip
    parts.append(text(20, height - 16, "Beside the rooms: features (cells, engines, pytest, ...), whose files name a "
                      "room; and what is for users to name.",
                      anchor="start", fill="#555"))  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "rooms.svg").write_text(rooms(), encoding="utf-8")
    (HERE / "processes.svg").write_text(processes(), encoding="utf-8")
    (HERE / "machines.svg").write_text(machines(), encoding="utf-8")
