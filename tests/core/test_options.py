"""Options, named as the caller writes them."""

from practicum.core.options import spell_for_shell, spell_options


def test_python_reads_keyword_arguments() -> None:
    assert spell_options(resume=True) == "resume=True"
    assert spell_options(allow_changed=["train", "seed"]) == 'allow_changed=["train", "seed"]'
    both = spell_options(resume=True, overrides=["monitors.M1=warn"])
    assert both == 'resume=True, overrides=["monitors.M1=warn"]'


def test_a_shell_reads_flags_and_words_without_a_flag() -> None:
    with spell_for_shell():
        assert spell_options(resume=True, out="another folder") == "--resume --out another folder"
        assert spell_options(allow_changed=["train", "seed"]) == (
            "--allow-changed train --allow-changed seed"
        )
        assert (
            spell_options(overrides=["train.steps=4", "about=a b"]) == "train.steps=4 'about=a b'"
        )
        assert spell_options(set=["seed=1"]) == "--set seed=1"
    assert spell_options(seeds=3) == "seeds=3"
