"""Made-up expected answers of each kind that datasets of mathematics have, with replies to them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gold:
    """An answer as stored in a file, with right and wrong replies."""

    answer: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


GOLDS = {
    "integer": Gold("17", ("\\boxed{17}", "so it is 17", "$17.0$"), ("\\boxed{1}", "7")),
    "leading zeros": Gold("041", ("\\boxed{41}", "\\boxed{041}"), ("\\boxed{4}",)),
    "thousands": Gold("12,500", ("\\boxed{12500}", "\\boxed{12,500}"), ("\\boxed{12}",)),
    "root": Gold(
        "7\\sqrt3", ("\\boxed{7\\sqrt{3}}", "$\\sqrt{147}$"), ("\\boxed{7}", "\\boxed{3}")
    ),
    "complex": Gold("8 - 3i", ("\\boxed{8-3i}",), ("\\boxed{8}", "\\boxed{3}", "\\boxed{8+3i}")),
    "half-open interval": Gold(
        "(-\\infty, 5]", ("\\boxed{(-\\infty,5]}",), ("\\boxed{5}", "\\boxed{(-\\infty,5)}")
    ),
    "union": Gold(
        "[0,1) \\cup (2,3]", ("\\boxed{[0,1)\\cup(2,3]}",), ("\\boxed{0}", "\\boxed{[0,1)}")
    ),
    "polynomial": Gold(
        "x^3 + 2x - 9", ("\\boxed{x^3+2x-9}", "\\boxed{-9+2x+x^3}"), ("\\boxed{3}", "\\boxed{9}")
    ),
    "pair": Gold("(4, 7)", ("\\boxed{(4,7)}",), ("\\boxed{4}", "\\boxed{(7,4)}")),
    "list": Gold(
        "2, 5, 11", ("\\boxed{2,5,11}", "\\boxed{11, 2, 5}"), ("\\boxed{2}", "\\boxed{2,5}")
    ),
    "set": Gold("\\{2, 5\\}", ("\\boxed{\\{5,2\\}}",), ("\\boxed{2}",)),
    "vector": Gold(
        "\\begin{pmatrix} 6 \\\\ -1 \\end{pmatrix}",
        ("\\boxed{\\begin{pmatrix}6\\\\-1\\end{pmatrix}}",),
        ("\\boxed{6}", "\\boxed{\\begin{pmatrix}-1\\\\6\\end{pmatrix}}"),
    ),
    "mixed number": Gold(
        "3\\frac{1}{4}", ("\\boxed{3\\frac{1}{4}}", "\\boxed{\\frac{13}{4}}"), ("\\boxed{3}",)
    ),
    "mixed number in a line": Gold(
        "4 1/8", ("\\boxed{\\frac{33}{8}}", "$4 1/8$", "\\boxed{4.125}"), ("\\boxed{4}",)
    ),
    "sign of a fraction": Gold("4\u215b", ("\\boxed{\\frac{33}{8}}", "$4\u215b$"), ("\\boxed{4}",)),
    "sign of a root": Gold(
        "5\u221a7", ("\\boxed{5\\sqrt7}", "\\boxed{5\u221a7}"), ("\\boxed{5}", "\\boxed{7}")
    ),
    "raised digits": Gold(
        "3\u207b\u00b2", ("\\boxed{\\frac19}", "$3^{-2}$"), ("\\boxed{3}", "\\boxed{9}")
    ),
    "sign of infinity": Gold(
        "(-\u221e, 6] \u222a [8, 9)",
        ("\\boxed{(-\\infty,6]\\cup[8,9)}",),
        ("\\boxed{6}", "\\boxed{(-\\infty,6]}"),
    ),
    "unit with a raised digit": Gold("14 cm\u00b2", ("\\boxed{14}",), ("\\boxed{196}",)),
    "plain number before signs": Gold(
        "5", ("\\boxed{5}",), ("\\boxed{5\u221a7}", "\\boxed{5\u00bd}")
    ),
    "fraction": Gold(
        "\\frac{14}{3}", ("\\boxed{\\frac{14}3}", "\\boxed{14/3}"), ("\\boxed{14}", "\\boxed{3}")
    ),
    "money": Gold("\\$24.50", ("\\boxed{\\$24.50}", "\\boxed{24.5}"), ("\\boxed{24}",)),
    "unit": Gold("12\\text{ cm}", ("\\boxed{12\\text{ cm}}", "\\boxed{12}"), ("\\boxed{13}",)),
    "percent": Gold("35\\%", ("\\boxed{35\\%}", "\\boxed{35}", "\\boxed{0.35}"), ("\\boxed{3}",)),
    "angle": Gold("75^\\circ", ("\\boxed{75^\\circ}", "\\boxed{75}"), ("\\boxed{7}",)),
    "name": Gold("\\text{Priya}", ("\\boxed{\\text{Priya}}",), ("\\boxed{\\text{Omar}}",)),
    "choice": Gold("(C)", ("\\boxed{C}", "\\boxed{(C)}"), ("\\boxed{B}",)),
    "equation": Gold("y = 3x + 2", ("\\boxed{y=3x+2}",), ("\\boxed{3}", "\\boxed{2}")),
    "scientific": Gold(
        "6.3e12",
        ("\\boxed{6.3e12}", "\\boxed{6.3 \\times 10^{12}}", "it is 6.3e12"),
        ("\\boxed{6.3}",),
    ),
    "tiny": Gold(
        "2.4e-15",
        ("\\boxed{2.4 \\times 10^{-15}}",),
        ("\\boxed{0}", "\\boxed{3.1 \\times 10^{-15}}", "\\boxed{2.4}"),
    ),
    "euler": Gold("4e - 7", ("\\boxed{4e-7}", "\\boxed{-7 + 4e}"), ("\\boxed{4}", "\\boxed{7}")),
    "dollars": Gold("$2\\sqrt{5}$", ("\\boxed{2\\sqrt5}",), ("\\boxed{2}",)),
    "several in dollars": Gold(
        "$-6$ or $6$", ("\\boxed{-6, 6}", "\\boxed{6} or \\boxed{-6}"), ("\\boxed{-6}",)
    ),
    "parentheses": Gold("\\(9\\pi\\)", ("\\boxed{9\\pi}",), ("\\boxed{9}",)),
    "box": Gold("We add 3 and 4, so the sum is $\\boxed{7}$.", ("\\boxed{7}",), ("\\boxed{3}",)),
    "worked solution": Gold(
        "He has 30% of 110, so <<110*0.3=33>>33%.\n#### 33", ("\\boxed{33}", "33"), ("\\boxed{30}",)
    ),
}

REFUSED = {
    "prose": "She sold 24 clips in May, so she sold 72 in both months",
    "lines": "24 + 48 = 72\nso there are 72",
    "text around a unit": "20 $cm^{2}$",
    "unbalanced": "$221,$8$",
    "nothing": "$ $",
}
"""Answers for which no short reply would score 1."""
