"""The page of `inspect --html` in a real browser, beside the model itself; its arguments; what strangers' words do."""

import base64
import json
import re
import zlib

import chromium
import pytest
import torch
from sizes import TINY
from transformers import Qwen3Config, Qwen3ForCausalLM, T5Config, T5ForConditionalGeneration

import blockformer
from blockformer.cli import main
from blockformer.page.build import MAX_BYTES, page
from blockformer.page.facts import Facts
from blockformer.page.making import page_of
from blockformer.pictures.canvas import PALETTE
from blockformer.summary import summarize

TEXT = "the heap of a list and its smallest item"
HOSTILE = "</script><img/src=x/onerror=harmed=1>"
TOKENS = {"vocab_size": 512, "eos_token_id": 0, "pad_token_id": 1}
needs_browser = pytest.mark.skipif(not (chromium.CHROMIUM and chromium.DRIVER), reason=chromium.MISSING)


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code or 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_tokenizer):
    """A decoder and an encoder-decoder, official, with a tokenizer that has a token to break out of a script with."""
    import copy

    torch.manual_seed(0)
    sizes = {**TINY, "num_hidden_layers": 3}
    config = Qwen3Config(**TOKENS, **sizes, num_key_value_heads=2, head_dim=8, initializer_range=0.4)
    t5 = T5Config(**TOKENS, decoder_start_token_id=1, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens([HOSTILE])
    made = {}
    for name, model in (("qwen3", Qwen3ForCausalLM(config)), ("t5", T5ForConditionalGeneration(t5))):
        model.resize_token_embeddings(len(tokenizer))
        made[name] = tmp_path_factory.mktemp(name) / name
        model.save_pretrained(made[name])
        tokenizer.save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    one = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def unpacked(group, rows, columns):
    content = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(group["data"]))), dtype=torch.uint8)
    return content.view(-1, rows, columns).split(group["heads"])


@pytest.mark.parametrize("name", ["qwen3", "t5"])
def test_a_text_on_the_page_is_what_the_model_gives(name, folders):
    told = data_of(page_of(str(folders[name]), TEXT))["text"]
    model = blockformer.from_official(folders[name])
    model.set_attn_implementation("eager")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders[name])
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    inputs = {"input_ids": ids}
    if name == "t5":
        inputs["decoder_input_ids"] = model.generate(ids, max_new_tokens=24, do_sample=False)
    with torch.no_grad():
        output = model(**inputs, output_attentions=True, output_hidden_states=True)
    kinds = ["attentions"] if name == "qwen3" else ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    assert len(told["maps"]) == len(kinds)
    for group, kind in zip(told["maps"], kinds, strict=True):
        maps = unpacked(group, *output[kind][0].shape[2:])
        for ours, theirs in zip(maps, output[kind], strict=True):
            assert (ours / 255 - theirs[0]).abs().max() <= 0.5 / 255 + 1e-6
    side = told["sides"][-1]
    shares, tokens = output.logits[0].softmax(-1).topk(5)
    for place, line in enumerate(side["lens"]["said"][-1]):
        assert line[1::2] == pytest.approx((shares[place] * 1e4).round().tolist(), abs=1)
        words = [tokenizer.decode([int(token)]) for token in tokens[place]]
        assert len(words) == len(line[::2])
    states = output.hidden_states if name == "qwen3" else output.decoder_hidden_states
    norms = torch.stack([state[0].norm(dim=-1) for state in states[:-1]])
    assert torch.allclose(torch.tensor(side["norms"][:-1]), norms, rtol=1e-3)
    assert len(side["norms"]) == len(states)


def test_a_long_text_is_cut_and_the_page_says_so(folders, monkeypatch):
    import blockformer.page.making as making

    text = TEXT * 80
    html = page_of(str(folders["qwen3"]), text)
    assert len(html.encode()) < MAX_BYTES
    assert data_of(html)["text"]["note"].startswith(f"The first {making.MAX_TOKENS} of ")
    monkeypatch.setattr(making, "MAX_BYTES", 120_000)
    smaller = page_of(str(folders["qwen3"]), text)
    assert len(smaller.encode()) <= 120_000
    assert len(data_of(smaller)["text"]["sides"][0]["tokens"]) < making.MAX_TOKENS


def test_weights_of_four_bits_have_a_page_and_read_a_text(tmp_path, tiny_tokenizer):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = blockformer.preset("qwen3", **sizes, **TOKENS, linear_bits=4, linear_group_size=32)
    blockformer.BlockformerDecoderForCausalLM(config).save_pretrained(tmp_path / "low")
    tiny_tokenizer.save_pretrained(tmp_path / "low")
    data = data_of(page_of(str(tmp_path / "low"), TEXT))
    summary = summarize(tmp_path / "low")
    totals = {name: word for name, _, word in data["totals"]}
    assert totals["weights"] == f"in float32: {summary.memory['4 bits and float32']:,} bytes"
    assert totals["parameters"].startswith(f"{summary.parameters:,};")
    assert len(data["text"]["maps"][0]["heads"]) == 2
    assert ["linear_bits", "4"] in [field[:2] for field in data["boxes"][3]["fields"]]


def test_a_preset_beside_a_language_model_has_a_head_too():
    beside = data_of(page_of("qwen3", beside="bert"))["beside"]
    assert beside["boxes"]["lm_head"] == [
        "tie_word_embeddings is False, in bert True.",
        "lm_head_bias is False, in bert True.",
    ]
    assert any(title.startswith("Dense, activation, norm") for title in beside["missing"])
    assert not any(title.startswith("Pooler") for title in beside["missing"])


def test_arguments_are_checked_first_and_a_page_is_whole_or_not_there(tmp_path, folders, capsys):
    target = tmp_path / "page.html"
    for arguments, message in (
        (["bert", "--text", "x"], "need --html"),
        (["bert", "--html", target, "--text", "x"], "text (--text) needs weights"),
        (["bert", "--html", target, "--text", " "], "--text is empty"),
        (["bert", "--html", tmp_path], "a folder; name a file"),
        (["bert", "--html", tmp_path / "no" / "page.html"], "no such folder"),
        (["bert", "--html", target, "--compare", "berd"], "Did you mean the preset 'bert'?"),
    ):
        assert call("inspect", *arguments) != 0
        assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().err).split()), arguments
        assert not target.exists()
    assert call("inspect", "bert", "--html", target) == 0
    before = target.read_bytes()
    assert call("inspect", "gpt2", "--html", target) == 1
    assert "replace it with --force" in capsys.readouterr().err
    assert target.read_bytes() == before
    assert call("inspect", "gpt2", "--html", target, "--force") == 0
    assert target.read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_nothing_on_a_page_comes_from_elsewhere_or_breaks_out_of_it(folders):
    html = page_of(str(folders["qwen3"]), f"a {HOSTILE} b")
    assert HOSTILE in data_of(html)["text"]["sides"][0]["tokens"]
    assert "<img" not in html
    assert html.count("</script>") == 2
    named = page(Facts(blockformer.preset("bert", num_hidden_layers=1), 4), HOSTILE)
    assert "<img" not in named
    plain = page(Facts(blockformer.preset("bert", num_hidden_layers=1), 4), "bert")
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", plain)


def luminance(color):
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("side", [0, 1])
def test_text_has_the_contrast_of_aa(side):
    grounds = ["paper", "panel", "pink", "orange", "blue", "yellow", "purple", "green"]
    for ink in ("ink", "grey"):
        for ground in grounds:
            light, dark = sorted((luminance(PALETTE[name][side]) for name in (ink, ground)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)


@needs_browser
def test_the_page_in_a_browser(window, folders, tmp_path):
    """It opens without errors, boxes open by mouse and keys, and a map tells what `output_attentions=True` gives."""
    path = tmp_path / "page.html"
    path.write_text(page_of(str(folders["qwen3"]), f"{TEXT} {HOSTILE}", beside="bert"), encoding="utf-8")
    window.width(1280)
    window.open(path)
    window.wait("return document.body.dataset.ready")
    assert not [line for line in window.log() if line["level"] == "SEVERE"]
    assert window.run("return window.harmed") is None
    assert window.run("return document.querySelectorAll('img').length") == 0
    boxes = window.run("return [...document.querySelectorAll('.box')].map(box => box.dataset.path)")
    assert len(boxes) == 8
    for place, box in enumerate(boxes):
        window.run(
            "document.querySelectorAll('.box')[arguments[0]].dispatchEvent(new MouseEvent('click', {bubbles: true}))",
            place,
        )
        assert f"Module: {box}" in window.run("return document.getElementById('panel').innerText")
    assert "Different from bert" in window.run("return document.getElementById('panel').innerText")
    # By the keyboard: to the first box, one further, open.
    window.run("document.querySelector('.box').focus()")
    window.press(chromium.TAB, chromium.ENTER)
    assert f"Module: {boxes[1]}" in window.run("return document.getElementById('panel').innerText")
    assert window.run("return document.querySelectorAll('.box.open').length") == 1

    model = blockformer.from_official(folders["qwen3"])
    model.set_attn_implementation("eager")
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folders["qwen3"])(f"{TEXT} {HOSTILE}", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        maps = model(ids, output_attentions=True).attentions
    length = ids.shape[1]
    window.run("document.querySelectorAll('.map')[6].focus()")
    assert window.run("return document.querySelector('.large h3').textContent") == "Layer 1, head 2"
    wide = window.run("return document.getElementById('large-map').getBoundingClientRect().width")
    for row, column in ((0, 0), (length - 1, 3), (5, 2)):
        window.point("#large-map", (column + 0.5) * wide / length, (row + 0.5) * wide / length)
        value = float(window.run("return document.getElementById('value').textContent"))
        assert value == pytest.approx(maps[1][0, 2, row, column].item(), abs=0.0026), (row, column)
        named = window.run("return [...document.querySelectorAll('.axis .here')].map(label => label.title)")
        assert [int(each.partition(":")[0]) for each in named] == [column, row]
    shown = window.run(
        "return ['columns', 'rows'].map(side => document.querySelectorAll(`.axis.${side} span:not(.hidden)`).length)"
    )
    assert all(5 < each <= length for each in shown)
    window.run("document.querySelectorAll('.map')[6].focus()")
    window.press(chromium.RIGHT)
    assert window.run("return document.querySelector('.large h3').textContent") == "Layer 1, head 3"
    window.press(chromium.DOWN)
    assert window.run("return document.querySelector('.large h3').textContent") == "Layer 2, head 3"
    window.run("document.getElementById('large-map').focus()")
    before = window.run("return document.getElementById('reading').textContent")
    window.press(chromium.LEFT)
    assert window.run("return document.getElementById('reading').textContent") != before
    # Another token: its row of words, its line among the norms.
    window.run("document.querySelectorAll('.tokens button')[3].click()")
    assert "At token 3 " in window.run("return document.getElementById('lens').textContent")
    assert "in blue 3: " in window.run("return document.getElementById('norms').textContent")
    window.width(360)
    assert window.run("return document.documentElement.scrollWidth") <= 360
    window.width(1280)
    assert not [line for line in window.log() if line["level"] == "SEVERE"]


@needs_browser
@pytest.mark.parametrize("name", ["bert", "t5", "gemma3_text", "mixtral", "gpt_neox"])
def test_pages_fit_a_phone_and_layers_can_be_chosen(name, window, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page(Facts(blockformer.preset(name), 8), name), encoding="utf-8")
    for pixels in (360, 1280):
        window.width(pixels)
        window.open(path)
        assert window.run("return document.documentElement.scrollWidth") <= pixels
    assert not [line for line in window.log() if line["level"] == "SEVERE"]
    kinds = window.run("return document.querySelectorAll('#kinds button').length")
    assert kinds == (2 if name == "gemma3_text" else 0)
    if kinds:
        window.run("document.querySelectorAll('#kinds button')[1].click()")
        assert window.run("return [...document.querySelectorAll('#figures > div')].map(one => one.hidden)") == [
            True,
            False,
        ]
    assert window.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    window.dark(True)
    assert window.run("return getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
    window.dark(False)
