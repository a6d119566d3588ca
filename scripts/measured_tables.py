"""Write the tables of docs/measurements.md, in both languages, from the records of runs in `benchmarks/runs/`.

A record is one run: its date, command, machine and rows, as a program of `benchmarks/` writes it. In one with `copied`
the figures are from a page, and only what stood there is known. `notes` say more of a run, in English and Chinese. For
a newer run, put its file in place of the record, or add it and put its name into `TABLES`.

Usage: python scripts/measured_tables.py
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "benchmarks" / "runs"
PAGES = (ROOT / "docs" / "measurements.md", ROOT / "docs" / "zh" / "measurements.md")
CHINESE = (
    ("convert to blockformer", "转成我们的格式"),
    ("convert to official", "转回官方格式"),
    ("convert to either", "转换"),
    ("command", "命令"),
    ("function", "函数"),
    ("whole process", "整个进程"),
    ("added to the resident", "新增的常驻内存"),
    ("training step", "训练一步"),
    ("load, first token", "加载，第一个词元"),
    (", load and save", " 加载并保存"),
    (r"(\d+) docstrings", r"\1 段文档字符串"),
    (r"(\d+%) full", r"填满 \1"),
    ("encoder", "编码器"),
    (r"(\d) beams?", r"\1 束"),
    (r"beam (\d)", r"束宽 \1"),
    ("greedy", "贪心"),
    ("few rows in parts", "行数少时拆开权重"),
    ("packed weights", "权重重排"),
    ("oneDNN's matmul", "oneDNN 的乘法"),
    ("PyTorch's 4-bit matmul", "PyTorch 的 4 位乘法"),
    ("by way of float32", "改用 float32 来乘"),
    (r"(\d+) texts?", r"\1 段文本"),
    ("batches", "批次"),
    (r"\bmany rows", "多行"),
    (r"\bfew rows", "少数几行"),
    ("a token", "一个词元"),
    (r"\(texts\)", "(文本)"),
    ("decoders", "解码器"),
    ("all models", "全部模型"),
    ("unprepared", "不做准备"),
    ("prepared", "已准备"),
    ("compiled", "已编译"),
    ("prefill", "预填充"),
    ("prompt", "提示"),
    ("decode", "解码"),
    ("head bfloat16", "输出头 bfloat16"),
    ("4 bits", "4 位"),
    (r" of width ([\d,]+\d)", r"，宽度 \1"),
    (" width", " 的宽度"),
    (r"layers of (\d+) experts", r"层、\1 个专家"),
    (r"(\d) layers", r"\1 层"),
    (" to ", " 到 "),
    (", ", "，"),
    ("; ", "；"),
    (r" \(", "（"),
    (r"\)", "）"),
)
"""What a cell says in English -> in Chinese, one after the other."""


SAID = (
    {"threads": "threads", "busy": "busy with other work", "memory": "memory is read at"}
    | {"speeds": "matmuls reach ", "matmuls": "{} GFLOPS in {}"},
    {"threads": "个线程", "busy": "机器较忙", "memory": "读内存"}
    | {"speeds": "矩阵乘法 ", "matmuls": "{1} {0} GFLOPS"},
)
"""What is said of a machine, in English and in Chinese."""


@dataclass(frozen=True)
class Column:
    """A column of a table: what it is called in English and in Chinese, and its cell for some rows (mostly one)."""

    name: str
    chinese: str
    cell: Callable[[list[dict]], str]


def of(key: str) -> Callable[[list[dict]], str]:
    """A cell that has this entry of its row; a dash where it is empty."""
    return lambda rows: f"{rows[0][key]:,}" if isinstance(rows[0][key], int) and rows[0][key] else rows[0][key] or "-"


def number(value: float) -> str:
    """With one digit after the point below 100, with none above."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def spread(value: float | list[float], shown: Callable[[float], str] = "{:.2f}".format) -> str:
    """A number, or the first and the last of a range."""
    return " to ".join(map(shown, value)) if isinstance(value, list) else shown(value)


def times(side: str) -> Callable[[list[dict]], str]:
    """Best / median of a side in milliseconds, or memory in MB; one of them where only one is known."""

    def cell(rows: list[dict]) -> str:
        row = rows[0]
        scale, unit = (1e3, "") if row["unit"] == "seconds" else (1e-6, " MB")
        known = [number(row[f"{side}_{of}"] * scale) for of in ("min", "median") if f"{side}_{of}" in row]
        return (" / ".join(known) if row["unit"] == "seconds" else known[0]) + unit

    return cell


def ratio(rows: list[dict]) -> str:
    """Best / median; one of them where only one is known."""
    return " / ".join(spread(rows[0][key]) for key in ("ratio_min", "ratio_median") if key in rows[0])


def state(rows: list[dict]) -> str:
    return (re.findall(r"\w*prepared|compiled", rows[0]["work"]) or ["unprepared"])[-1]


def gains(rows: list[dict]) -> str:
    """The ratios of each model: "GPT-2 1.16 (1 text), 1.14 (4 texts); ..."."""
    found: dict[str, list[str]] = {}
    for row in rows:
        texts = re.search(r"(\d+) x [\d,]+$", row["work"])
        of_what = f"{texts[1]} text{'s' if texts[1] != '1' else ''}" if texts else row["work"].removeprefix("encode, ")
        gain = spread(row["ratio_median"], "{:.3g}".format)
        said = {"decode": "a token", "greedy": "a token", "encode": "texts"}.get(of_what, of_what.partition(" of ")[0])
        found.setdefault(row["shape"].partition(",")[0], []).append(f"{gain} ({said})")
    return "; ".join(f"{shape} {', '.join(works)}" for shape, works in found.items())


SHAPE, WORK = Column("shape", "形状", of("shape")), Column("work", "任务", of("work"))
DTYPE = Column("dtype", "dtype", lambda rows: {"int4": "4 bits"}.get(rows[0]["dtype"], rows[0]["dtype"]))
BATCH, CONTEXT = Column("batch", "批大小", of("batch")), Column("context", "上下文", of("context"))
OURS, PEER = Column("Blockformer", "Blockformer", times("ours")), Column("compared with", "对比", of("peer"))
THEIRS, RATIO = Column("its time", "对方的时间", times("peer")), Column("ratio", "比值", ratio)
STATE = Column("ours", "方式", state)
RUN = Column("processor", "处理器", of("run"))
PATH = Column("fast path", "办法", lambda rows: rows[0]["peer"].removeprefix("without "))
COMPARED = (OURS, PEER, THEIRS, RATIO)


@dataclass(frozen=True)
class Table:
    """A table of some records.

    Attributes:
        records: their names.
        columns: of each row, or of each group of rows where there are `across`.
        across: further columns, each with the work and the context (0: any) of the row of a group that it shows.
    """

    records: Sequence[str]
    columns: Sequence[Column]
    across: Sequence[tuple[Column, str, int]] = ()

    def lines(self, rows: list[dict]) -> Iterator[list[str]]:
        """The cells of each line in English."""
        if not self.across:
            yield from ([column.cell([row]) for column in self.columns] for row in rows)
            return
        groups: dict[tuple, list[dict]] = {}
        first: dict[str, int] = {}  # cell -> where it is first seen, which is the order of the lines
        for row in rows:
            key = tuple(column.cell([row]) for column in self.columns)
            groups.setdefault(key, []).append(row)
            first |= {cell: len(first) for cell in key if cell not in first}
        for key, members in sorted(groups.items(), key=lambda group: [first[cell] for cell in group[0]]):
            cells = []
            for column, work, context in self.across:
                found = [row for row in members if re.match(work, row["work"]) and context in (0, row.get("context"))]
                cells.append(column.cell(found) if found else "-")
            yield [*key, *cells]


def each(english: str, chinese: str, work: str, *contexts: int) -> list[tuple[Column, str, int]]:
    """A column of ratios for each context."""
    return [
        (Column(f"{english} {context:,}", chinese.format(f"{context:,}"), ratio), work, context) for context in contexts
    ]


TABLES = {
    "llama.cpp": Table(["llama-cpp"], (DTYPE, CONTEXT, *COMPARED)),
    "ONNX Runtime and OpenVINO": Table(["onnx-openvino"], (WORK, DTYPE, *COMPARED)),
    "CTranslate2": Table(["ctranslate2", "ctranslate2-amd"], (WORK, RUN, *COMPARED)),
    "sentences": Table(["sentences-transformers", "sentences-runtimes"], (WORK, *COMPARED)),
    "encoders": Table(["encoders-float32", "encoders-bfloat16"], (SHAPE, WORK, DTYPE, OURS, THEIRS, RATIO)),
    "loading": Table(["loading"], (SHAPE, DTYPE, OURS, THEIRS, RATIO)),
    "training and converting": Table(["training-converting"], (WORK, DTYPE, BATCH, *COMPARED)),
    "AMD with AVX-512": Table(
        ["amd-avx512", "amd-prepared-bfloat16", "amd-compiled-bfloat16"],
        (SHAPE, WORK, DTYPE, BATCH, CONTEXT, *COMPARED),
    ),
    "layers with a state": Table(
        ["hybrid-amd-avx512", "hybrid-amd", "hybrid-xeon"],
        (SHAPE, RUN, STATE),
        (
            *each("token after", "{} 个词元之后", "decode", 16, 512),
            *each("prompt of", "{} 个词元的提示", "prefill", 512, 2048),
        ),
    ),
    "prompts": Table(
        ["prompts-avx512", "prompts-avx2", "prompts-xeon"],
        (WORK, DTYPE, RUN),
        each("prompt of", "{} 个词元", "prompt", 8, 64, 512, 2048),
    ),
    "fast paths": Table(
        ["ways-avx512", "ways-avx2", "ways-xeon", "ways-xeon-avx2"],
        (PATH, DTYPE, RUN),
        [(Column("what it gains", "收益", gains), "", 0)],
    ),
}


def record(name: str) -> dict:
    """A record; each of its rows knows of which run it is."""
    run = json.loads((RUNS / f"{name}.json").read_text(encoding="utf-8"))
    machine = run["machine"]
    processor = re.sub(r"\(R\)| (EPYC|Processor).*", "", machine.get("processor", ""))
    label = f"{processor}, {machine['instructions'].partition(',')[0]}"
    for row in run["rows"]:
        row["run"] = label
    return run


def about(run: dict, chinese: bool, with_dtypes: bool) -> str:
    """When, where and how a run was measured."""
    day, machine = date.fromisoformat(run["date"]), run["machine"]
    said = SAID[chinese]
    parts = [machine[key] for key in ("processor", "instructions") if key in machine]
    parts += [f"{machine['threads']} {said['threads']}"] if "threads" in machine else []
    parts += [said["busy"]] if run.get("is_busy") else []
    facts = [", ".join(parts)]
    if "read_gbs" in machine:
        facts.append(f"{said['memory']} {spread(machine['read_gbs'], '{:.0f}'.format)} GB/s")
    if speeds := machine.get("gemm_gflops"):
        told = [said["matmuls"].format(spread(speed, "{:.0f}".format), dtype) for dtype, speed in speeds.items()]
        facts.append(said["speeds"] + ", ".join(told))
    packages = {key: machine[key] for key in ("torch", "transformers") if key in machine} | run.get("versions", {})
    facts += [", ".join(f"{name} {version}" for name, version in packages.items())] if packages else []
    facts += [", ".join(dict.fromkeys(row["dtype"] for row in run["rows"]))] if with_dtypes else []
    facts += [f"`{run['command']}`"] if "command" in run else []
    notes = run.get("notes", ("", ""))[chinese]
    if chinese:
        told = "；".join(facts).replace(" to ", " 到 ").replace(", ", "，")
        return f"{day.year} 年 {day.month} 月 {day.day} 日：{told}。{notes}"
    return f"{day.day} {day:%B %Y}: {'; '.join(facts)}. {notes}".rstrip()


def in_chinese(cell: str) -> str:
    for pattern, words in CHINESE:
        cell = re.sub(pattern, words, cell)
    return cell


def written(table: Table, chinese: bool) -> str:
    """A table below what is known of its runs."""
    runs = [record(name) for name in table.records]
    told = [f"{'- ' if len(runs) > 1 else ''}{about(run, chinese, len(runs) > 1)}" for run in runs]
    columns = [*table.columns, *(column for column, *_ in table.across)]
    head = [column.chinese if chinese else column.name for column in columns]
    lines = [[in_chinese(cell) for cell in line] if chinese else line
             for line in table.lines([row for run in runs for row in run["rows"]])]  # fmt: skip
    made = [f"| {' | '.join(line)} |" for line in (head, *lines)]
    return "\n".join([*told, "", made[0], f"|{'---|' * len(head)}", *made[1:]])


def pages() -> dict[Path, str]:
    """Both pages with their tables."""
    made = {}
    for chinese, path in enumerate(PAGES):
        text = path.read_text(encoding="utf-8")
        for name, table in TABLES.items():
            pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)", re.S)
            if not pattern.search(text):
                raise SystemExit(
                    f"{path.name} has no place for '{name}': it needs <!-- {name} --> and <!-- end of {name} -->"
                )
            content = written(table, bool(chinese))
            text = pattern.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
        made[path] = text
    return made


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
