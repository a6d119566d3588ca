"""Write the speeds of one run into the READMEs and the pages on benchmarks, and draw them.

All figures come from `benchmarks/runs/cpu.json`, which `benchmarks/run.py` wrote, and in the READMEs also from
docs/gpu.md and docs/quickstart.md; nobody copies one by hand. The page of measurements has the run on an AMD processor
with AVX2, of `amd-avx2.json`.

Usage: python scripts/speed_pages.py [SPEED.json ...]    (first takes over the speed.json of a run, or of several)

`make bench-pages` measures what the pages show and writes them.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from blockformer.pictures.canvas import GREY, LIGHT, STRONG_BLUE, STRONG_ORANGE, Canvas

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "benchmarks" / "runs" / "cpu.json"
WITH_AVX2 = ROOT / "benchmarks" / "runs" / "amd-avx2.json"
PICTURE = ROOT / "docs" / "pictures" / "speed.svg"
PREPARED, COMPILED, BOTH = "prepared", "compiled", "both compiled"
SIDES = ("ours", "peer")
PEER = "transformers"
PEER_COMPILED = "transformers, compiled"
PEER_BOTH = "transformers compiled"
COLORS = {"transformers": LIGHT, PEER_BOTH: GREY, "prepared": STRONG_BLUE, "compiled": STRONG_ORANGE}


@dataclass(frozen=True)
class Work:
    """One line of the table: a shape and a work of the run, and how much one unit of its time does.

    Attributes:
        name, chinese: what the line is called.
        shape, work: of the run's rows, without ", prepared" and ", compiled".
        context: of the rows; 0 for all.
        amount: tokens or texts that one measured time stands for.
        drawn: whether the picture has it.
    """

    name: str
    chinese: str
    shape: str
    work: str
    context: int
    amount: int
    drawn: bool = False


TOKENS = [
    Work("Qwen3-0.6B, after 16 tokens", "Qwen3-0.6B，16 个词元之后", "Qwen3-0.6B", "decode", 16, 1, True),
    Work("Qwen3-0.6B, after 512", "Qwen3-0.6B，512 个之后", "Qwen3-0.6B", "decode", 512, 1),
    Work("Qwen3-0.6B, after 2,048", "Qwen3-0.6B，2,048 个之后", "Qwen3-0.6B", "decode", 2048, 1, True),
    Work("GPT-2, after 16", "GPT-2，16 个之后", "GPT-2", "decode", 16, 1, True),
    Work("GPT-2, after 512", "GPT-2，512 个之后", "GPT-2", "decode", 512, 1),
    Work("6 layers x 256, after 16", "6 层 x 256，16 个之后", "6 layers x 256", "decode", 16, 1),
    Work("T5-base width, 4 + 4 layers, 4 texts", "T5-base 的宽度，4 + 4 层，4 条文本", "T5-base", "greedy", 0, 4, True),
    Work("the same with 4 beams", "同上，4 个束", "T5-base", "beam 4", 0, 4),
    Work("Marian, 6 + 6 layers, 4 texts", "Marian，6 + 6 层，4 条文本", "Marian", "greedy", 0, 4, True),
    Work("the same with 4 beams", "同上，4 个束", "Marian", "beam 4", 0, 4),
]
"""Tokens per second."""
TEXTS = [
    Work(
        f"{name} width, 4 layers, {fill}% full", f"{name} 的宽度，4 层，填满 {fill}%",
        name, f"encoder, {fill}% full", 0, 16, drawn,
    )
    for name, drawn in (("BERT-base", True), ("T5-base", False))
    for fill in (41, 71, 100)
]  # fmt: skip
"""Texts of up to 128 tokens per second, 16 in a batch."""


class Run:
    """The machine and the rows of a run."""

    def __init__(self, path: Path = RUN):
        run = json.loads(path.read_text(encoding="utf-8"))
        self.machine: dict = run["machine"]
        self.day = date.fromisoformat(run["date"])
        self.notes: tuple[str, str] = tuple(run.get("notes", ("", "")))
        self.rows: list[dict] = run["rows"]
        self.has_both = any(row["peer"] == PEER_COMPILED for row in self.rows)

    def row(self, work: Work, state: str) -> dict | None:
        """The float32 row of a work in a state; None if the run has none."""
        ending = {PREPARED: ", prepared", COMPILED: ", compiled", BOTH: ", compiled"}.get(state, "")
        peer = PEER_COMPILED if state == BOTH else PEER
        for row in self.rows:
            right = row["shape"].startswith(work.shape) and row["work"] == work.work + ending and row["peer"] == peer
            if right and row["dtype"] == "float32" and work.context in (0, row["context"]):
                return row
        return None

    def machine_words(self) -> tuple[str, str]:
        """The day and the machine in English and Chinese."""
        machine, speed = self.machine, f"{self.machine['gemm_gflops']['float32']:,.0f} GFLOPS"
        read, threads, day = f"{machine['read_gbs']:.0f} GB/s", machine["threads"], self.day
        parts = machine["processor"], machine["instructions"]
        packages = f"torch {machine['torch']}", f"transformers {machine['transformers']}"
        return (
            f"{day.day} {day:%B %Y}: {', '.join(parts)}, {threads} threads; {', '.join(packages)}; float32; "
            f"memory is read at {read}, matrices multiplied at {speed}",
            f"{day.year} 年 {day.month} 月 {day.day} 日：{'，'.join(parts)}，{threads} 个线程；{'、'.join(packages)}；"
            f"float32；读内存 {read}，矩阵乘法 {speed}",
        )


def per_second(seconds: float, work: Work) -> str:
    """How much of a work a second holds, with three digits."""
    value = work.amount / seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def line(run: Run, work: Work, name: str, states: Sequence[str]) -> str:
    """A line of the table; speeds of the medians, and in brackets the ratio of the medians taken in turns."""
    rows = {state: run.row(work, state) for state in states}
    base = rows.get(PREPARED) or rows.get(COMPILED) or run.row(work, "")
    cells = [name, per_second(base["peer_median"], work) if base else ""]
    for state, row in rows.items():
        side = "peer" if state == BOTH else "ours"
        cells.append(f"{per_second(row[f'{side}_median'], work)} ({row['ratio_median']:.2f})" if row else "")
    return f"| {' | '.join(cells)} |"


HEADS = {
    "": ("work", "任务"),
    PEER: (PEER, PEER),
    PREPARED: (PREPARED, "准备后"),
    COMPILED: (COMPILED, "编译后"),
    BOTH: ("transformers compiled (ours compiled / it)", "编译后的 transformers（我们编译后是它的几倍）"),
}
KINDS = (
    (TOKENS, "Written tokens per second", "每秒生成的词元数"),
    (TEXTS, "Texts per second, 16 of up to 128 tokens in a batch", "每秒处理的文本数，一批 16 条，每条至多 128 个词元"),
)


def states_of(run: Run) -> tuple[Sequence[str], ...]:
    """For each kind of work, what the run has of it. Encoders are not compiled."""
    return ((PREPARED, COMPILED, BOTH) if run.has_both else (PREPARED, COMPILED)), (PREPARED,)


def tables(run: Run, chinese: bool) -> str:
    """The tables of a page, with a column for each state that the run has."""
    parts = [f"{run.machine_words()[chinese]}{'。' if chinese else '. '}{run.notes[chinese]}".rstrip()]
    for (works, *titles), shown in zip(KINDS, states_of(run), strict=True):
        head = [HEADS[name][chinese] for name in ("", PEER, *shown)]
        parts += ["", titles[chinese] + ("：" if chinese else ":"), ""]
        parts += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        parts += [line(run, work, work.chinese if chinese else work.name, shown) for work in works]
    return "\n".join(parts)


SLOWER = (
    (
        "In the tables above nothing that is prepared or compiled is slower than transformers.",
        "上面的表里，准备后或编译后没有一项比 transformers 慢。",
    ),
    ("In the tables above these are slower than transformers: {}.", "上面的表里，比 transformers 慢的有：{}。"),
    (" Slower than its compiled step: {}.", "比编译后的 transformers 慢的有：{}。"),
)
"""Nothing is slower; what is slower than transformers, and than its compiled step."""


def slower(run: Run, chinese: bool) -> str:
    """Which works of the tables are slower than transformers, or than its compiled step."""
    found: dict[bool, list[str]] = {False: [], True: []}
    for (works, *_), shown in zip(KINDS, states_of(run), strict=True):
        for work, state in ((work, state) for work in works for state in shown):
            row = run.row(work, state)
            if row and round(row["ratio_median"], 2) < 1:
                name = row["shape"].partition(",")[0], work.work, str(row["context"]), HEADS[state][0]
                words = ", ".join(name[: 3 if state == BOTH else 4])
                found[state == BOTH].append(f"{words} ({row['ratio_median']:.2f})")
    nothing, than_eager, than_compiled = (words[chinese] for words in SLOWER)
    joint = "；" if chinese else "; "
    said = than_eager.format(joint.join(found[False])) if found[False] else nothing
    return said + (than_compiled.format(joint.join(found[True])) if found[True] else "")


def every_row(run: Run, chinese: bool) -> str:
    """All rows of the run in milliseconds."""
    head = (
        "shape work dtype batch context Blockformer other its_time ratio,_best ratio,_median",
        "形状 任务 dtype 批大小 上下文 Blockformer 对方 它的时间 比值，最好 比值，中位数",
    )[chinese].split()
    lines = [f"| {' | '.join(head)} |".replace("_", " "), f"|{'---|' * len(head)}"]
    for row in run.rows:
        scale, unit = (1e3, "") if row["unit"] == "seconds" else (1e-6, " (MB)")
        mine, theirs = (" / ".join(f"{row[f'{side}_{of}'] * scale:,.1f}" for of in ("min", "median")) for side in SIDES)
        cells = [row["shape"], row["work"] + unit, row["dtype"], row["batch"] or "-", f"{row['context']:,}"]
        cells += [mine, row["peer"], theirs, f"{row['ratio_min']:.2f}", f"{row['ratio_median']:.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


WORDS = (
    (
        "Tokens per second of Qwen3-0.6B: transformers {peer}; ours prepared {prepared}, compiled {compiled}",
        "Prepared is after `prepare_for_inference()`, compiled with `compile=True` ([how](docs/make-it-faster.md)). "
        "After a short prompt Qwen3-0.6B writes {prepared} tokens per second prepared and {compiled} compiled, "
        "transformers {peer} (eager, its default on a CPU{both}). An encoder of BERT-base's width, its batch "
        "41 / 71 / 100% full, is {encoders} times as fast as transformers when prepared. With its trained weights "
        "the chat model above writes {chat_prepared} tokens per second prepared and {chat_compiled} compiled, "
        "transformers {chat_peer} "
        "([two cores](docs/quickstart.md#2-talk-to-it-and-count-the-tokens-two-minutes)). On a GPU, both compiled, "
        "a token of Qwen3-0.6B at batch 1 takes {h100} ms on an H100 and {h200} ms on an H200, transformers "
        "{peer_h100} and {peer_h200} ([GPUs](docs/gpu.md)). The CPU: {machine}.",
    ),
    (
        "Qwen3-0.6B 每秒的词元数：transformers {peer}；我们准备后 {prepared}，编译后 {compiled}",
        "“准备后”指调用 `prepare_for_inference()` 之后，“编译后”指再加上 `compile=True`"
        "（[怎样使用](docs/zh/make-it-faster.md)）。"
        "提示很短时，Qwen3-0.6B 准备后每秒写 {prepared} 个词元，编译后 {compiled} 个；"
        "transformers 是 {peer} 个（不编译，这是它在 CPU 上的默认做法{both}）。"
        "BERT-base 宽度的编码器，批次填满 41 / 71 / 100% 时，准备后的速度是 transformers 的 {encoders} 倍。"
        "上面的对话模型用训练好的权重，准备后每秒写 {chat_prepared} 个词元，"
        "编译后 {chat_compiled} 个，transformers 是 {chat_peer} 个"
        "（[两个核](docs/zh/quickstart.md#2-对话数一数每秒写几个词元两分钟)）。"
        "在 GPU 上，批大小 1，两边都编译，写 Qwen3-0.6B 的一个词元，"
        "H100 上 {h100} ms，H200 上 {h200} ms，transformers 是 {peer_h100} 和 {peer_h200} ms"
        "（[GPU](docs/zh/gpu.md)）。测量用的 CPU：{machine}。",
    ),
)
"""Of the READMEs: what the picture shows, for those who cannot see it, and the sentences below it."""


def sentences(run: Run, chinese: bool) -> str:
    """The picture of a README, and what it shows in words."""
    work = TOKENS[0]
    prepared, compiled = (run.row(work, state) for state in (PREPARED, COMPILED))
    both = run.row(work, BOTH)
    compiled_peer = (
        ("; compiled {}", "；编译后 {} 个")[chinese].format(per_second(both["peer_median"], work)) if both else ""
    )
    figures = {
        "machine": run.machine_words()[chinese],
        "both": compiled_peer,
        "peer": per_second(prepared["peer_median"], work),
        "prepared": per_second(prepared["ours_median"], work),
        "compiled": per_second(compiled["ours_median"], work),
        "encoders": " / ".join(f"{run.row(each, PREPARED)['ratio_median']:.2f}" for each in TEXTS[:3]),
        **of_a_chat((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")),
        **on_gpus((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")),
    }
    title, below = (words.format(**figures) for words in WORDS[chinese])
    return f"![{title}](docs/pictures/speed.svg)\n\n{below}"


def of_a_chat(page: str) -> dict[str, str]:
    """The tokens per second of the trained model in docs/quickstart.md."""
    speed = r"([\d.]+)"
    found = re.search(
        rf"transformers {speed}, Blockformer unprepared {speed}, prepared {speed}, compiled {speed}\. ", page
    )
    return {"chat_peer": found[1], "chat_prepared": found[3], "chat_compiled": found[4]}


def on_gpus(page: str) -> dict[str, str]:
    """The token of Qwen3-0.6B in the two tables of docs/gpu.md: milliseconds, ours and transformers'."""
    found = {}
    for name in ("h100", "h200"):
        table = page.split(f"**{name.upper()}**", 1)[1]
        row = re.search(r"^\| Qwen3-0\.6B, batch 1 after 128;.*? \| ([\d.]+) \| ([\d.]+) \|", table, re.M)
        found |= {name: row[1], f"peer_{name}": row[2]}
    return found


def picture(run: Run) -> str:
    """Bars, one group for each work that is drawn; each is so long as its speed is a multiple of transformers'."""
    works = [work for work in (*TOKENS, *TEXTS) if work.drawn]
    groups = []
    for work in works:
        rows = {state: run.row(work, state) for state in (PREPARED, COMPILED, BOTH)}
        base = rows[PREPARED]["peer_median"]
        seconds = [base, *(row and row[side] for row, side in (
            (rows[BOTH], "peer_median"), (rows[PREPARED], "ours_median"), (rows[COMPILED], "ours_median"),
        ))]  # fmt: skip
        groups.append((work, [(*bar, base / bar[1]) for bar in zip(COLORS.values(), seconds, strict=True) if bar[1]]))
    longest = max(ratio for _, bars in groups for *_, ratio in bars)
    height = 70 + sum(18 * len(bars) + 14 for _, bars in groups)
    canvas = Canvas(900, height + 22, "Speed as a multiple of transformers, with tokens or texts per second")
    x = 330
    for name, color in COLORS.items():
        if run.has_both or name != PEER_BOTH:
            canvas.rect(x, 18, 12, 12, color, "", rx=2)
            canvas.text(x + 18, 24, name, 12, "start")
            x += 50 + 8 * len(name)
    y, left, width = 48.0, 330.0, 420.0
    for work, bars in groups:
        canvas.text(left - 12, y + 9 * len(bars), work.name, 12.5, "end")
        unit = "texts/s" if work in TEXTS else "tokens/s"
        for color, seconds, ratio in bars:
            length = width * ratio / longest
            canvas.rect(left, y + 2, length, 14, color, "", rx=2)
            canvas.text(left + length + 6, y + 9, f"{per_second(seconds, work)} {unit}", 11, "start")
            y += 18
        y += 14
    canvas.line([(left + width / longest, 40), (left + width / longest, y)], GREY, 1, dashed=True)
    canvas.text(left, y + 12, "Bars: speed as a multiple of transformers', the dashed line.", 11, "start", fill=GREY)
    return canvas.finish()


def filled(text: str, name: str, content: str) -> str:
    """A page with this between its two comments of that name."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.S)
    if not pattern.search(text):
        raise SystemExit(f"the page has no place for '{name}': it needs <!-- {name} --> and <!-- end of {name} -->")
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def pages(run: Run) -> dict[Path, str]:
    """What the tool writes: each page, and the picture, with their text."""
    made, with_avx2 = {PICTURE: picture(run)}, Run(WITH_AVX2)
    for chinese, readme, docs in (
        (False, ROOT / "README.md", ROOT / "docs"),
        (True, ROOT / "README.zh-CN.md", ROOT / "docs" / "zh"),
    ):
        page, more = docs / "benchmarks.md", docs / "measurements.md"
        made[readme] = filled(readme.read_text(encoding="utf-8"), "speed", sentences(run, chinese))
        text = filled(page.read_text(encoding="utf-8"), "speed", tables(run, chinese))
        text = filled(text, "slower", slower(run, chinese))
        made[page] = filled(text, "every row", every_row(run, chinese))
        made[more] = filled(more.read_text(encoding="utf-8"), "speed", tables(with_avx2, chinese))
    return made


def take_over(paths: list[Path]) -> None:
    """Make one run of the files that `benchmarks/run.py` wrote on one machine; a later one replaces equal rows."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        for name in ("processor", "instructions", "threads", "torch", "transformers"):
            if run["machine"][name] != runs[0]["machine"][name]:
                raise SystemExit(
                    f"{path} has {name} {run['machine'][name]}, {paths[0]} has {runs[0]['machine'][name]}: "
                    "the pages show one machine, so measure every part on it"
                )
    key = ("shape", "work", "dtype", "context", "batch", "peer")
    rows = {tuple(row[name] for name in key): row for run in runs for row in run["rows"]}
    command = "; ".join(dict.fromkeys(run["command"] for run in runs if "command" in run))
    head = {"date": runs[-1]["date"], **({"command": command} if command else {}), "machine": runs[0]["machine"]}
    RUN.write_text(json.dumps({**head, "rows": list(rows.values())}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    if sys.argv[1:]:
        take_over([Path(name) for name in sys.argv[1:]])
    for path, text in pages(Run()).items():
        path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
