"""models/train/prepare.py and demo_data.py: tokens of a text, which come back, and what is said of others."""

import lzma
import subprocess
import sys

import pytest

from conftest import TRAIN

np = pytest.importorskip("numpy")
spm = pytest.importorskip("sentencepiece")

import demo_data  # noqa: E402
import prepare  # noqa: E402
import world  # noqa: E402

STORIES = "".join("The bell of house %d hangs near mill %d.\nIt is old.\n\n" % (i, i * 7 % 31) for i in range(300))


def run(monkeypatch, main, *args):
    monkeypatch.setattr(sys, "argv", ["program", *map(str, args)])
    main()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "my.txt"
    path.write_text(STORIES)
    return path


def test_documents_come_back_each_ended_and_the_end_is_held_out(text, tmp_path, monkeypatch):
    run(monkeypatch, prepare.main, "--train", text, "--blank-lines", "--vocab-size", 330, "--out", tmp_path)
    sp = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    found = []
    for name in ("train", "valid"):
        ids = np.fromfile(tmp_path / (name + ".bin"), "<u2").tolist()
        assert ids[0] == ids[-1] == prepare.EOS
        ends = [i for i, x in enumerate(ids) if x == prepare.EOS]
        found.append([sp.decode(ids[a + 1:b]) for a, b in zip(ends, ends[1:])])
    whole = [part for part in STORIES.split("\n\n") if part]
    train, valid = found
    assert 0.04 < len("".join(valid)) / len(STORIES) < 0.07
    assert "\n".join(train + valid).replace("\n", "") == "".join(whole).replace("\n", "")


@pytest.mark.parametrize("content, more, said", [
    (b"a\xff\nb\n", (), "my.txt: no text in UTF-8"),
    (None, (), "my.txt: No such file"),
    (b"one line", (), "a text of one line cannot be divided"),
    (STORIES.encode(), ("--tokenizer", "none"), "none: no SentencePiece model"),
    (b" \n", ("--valid", __file__), "my.txt: the train text is empty"),
    (STORIES.encode(), ("--valid", "/dev/null"), "--valid /dev/null: the valid text is empty"),
    (STORIES.encode(), ("--works", "t"), "--works needs --valid"),
    (STORIES.encode(), ("--works", "t", "--valid", __file__, "--blank-lines"), "goes without --blank-lines"),
    ("".join(chr(0x4E00 + i) + "\n" for i in range(600)).encode(), ("--vocab-size", 320), "than --vocab-size 320 leaves"),
    (STORIES.encode(), ("--vocab-size", 9), "--vocab-size is 9, but must be from 320"),
])
def test_what_cannot_be_prepared_is_named(tmp_path, content, more, said):
    if content is not None:
        (tmp_path / "my.txt").write_bytes(content)
    done = subprocess.run(list(map(str, (sys.executable, TRAIN / "prepare.py", "--train", tmp_path / "my.txt", "--out",
                                         tmp_path / "data", *more))), capture_output=True, text=True)
    assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "data" / "train.bin").exists()


@pytest.mark.parametrize("table, found", [
    ("split\tx\n", "must name the columns split"), ("", "must name the columns split"),
    ("", None), ("train\ta\t2\n", "line 3: first_line and last_line must be numbers of lines"), ("train\t1\n", "line 3"),
    ("train\t0\t2\n", "line 3"), ("train\t3\t2\n", "line 3"), ("train\t2\t4\n", "the train text, which has 3"),
    ("train\t2\t3\n", ["a\n", "b\nc\n"]), ("valid\t7\t9\n", ["a\n"])])
def test_works_are_lines_of_their_split(tmp_path, table, found):
    head = "" if isinstance(found, str) and "columns" in found else "split\tfirst_line\tlast_line\n"
    (tmp_path / "works").write_text(head + ("train\t1\t1\n" if head and found else "") + table)
    read = lambda: prepare.documents("a\nb\nc\n", str(tmp_path / "works"), "train", False)
    if isinstance(found, list):
        assert read() == found
        return
    with pytest.raises(SystemExit, match=found or "no work has the split train"):
        read()


def test_a_tokenizer_without_a_newline_is_refused(tmp_path):
    spm.SentencePieceTrainer.train(sentence_iterator=iter(STORIES.split("\n")), model_prefix=str(tmp_path / "t"),
                                   vocab_size=60, hard_vocab_limit=False, minloglevel=2)
    with pytest.raises(SystemExit, match="t.model: at most 65536 pieces"):
        prepare.read_tokenizer(str(tmp_path / "t.model"))


def test_a_preparation_that_was_killed_does_not_say_whose_its_tokens_are(text, tmp_path, monkeypatch):
    """Tokens of the tokenizer before would be read as other words."""
    import windows

    run(monkeypatch, prepare.main, "--train", text, "--vocab-size", 330, "--out", tmp_path / "a")
    (tmp_path / "b.txt").write_text(STORIES.replace("bell", "gong"))
    run(monkeypatch, prepare.main, "--train", tmp_path / "b.txt", "--vocab-size", 330, "--out", tmp_path / "b")
    assert windows.tokenizer_hash(tmp_path / "a") == prepare.file_hash(tmp_path / "a" / "tokenizer.model")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "write_ids", killed)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, prepare.main, "--train", text, "--tokenizer", tmp_path / "b" / "tokenizer.model", "--out",
            tmp_path / "a")
    with pytest.raises(SystemExit, match="the tokens beside it are of another tokenizer"):
        windows.tokenizer_hash(tmp_path / "a")


def test_a_tokenizer_that_is_there_is_kept_and_that_is_said(text, tmp_path, monkeypatch, capsys):
    run(monkeypatch, prepare.main, "--train", text, "--vocab-size", 330, "--out", tmp_path)
    before = (tmp_path / "tokenizer.model").read_bytes()
    assert "already" not in capsys.readouterr().err
    run(monkeypatch, prepare.main, "--train", text, "--vocab-size", 350, "--out", tmp_path)
    assert "which was there already" in capsys.readouterr().err
    assert (tmp_path / "tokenizer.model").read_bytes() == before


def test_the_demo_data_have_each_sentence_as_often_as_the_world_says(text, tmp_path, monkeypatch):
    for name in ("stories", "books"):
        (tmp_path / name).mkdir()
        with lzma.open(tmp_path / name / "train.txt.xz", "wt") as f:
            f.write(STORIES)
    (tmp_path / "stories" / "valid.txt").write_text("A held-out story.\n\nAnother one.\n")
    out = tmp_path / "data"
    run(monkeypatch, demo_data.main, "--stories", tmp_path / "stories", "--books", tmp_path / "books", "--out", out,
        "--vocab-size", 600, "--people", 12, "--things", 6, "--book-mb", 0.005, "--threads", 1, "--wordings", 3)
    sp = spm.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))

    def documents(name):
        ids = np.fromfile(out / name, "<u2").tolist()
        assert ids[0] == ids[-1] == prepare.EOS
        ends = [i for i, x in enumerate(ids) if x == prepare.EOS]
        return [sp.decode(ids[a + 1:b]) for a, b in zip(ends, ends[1:])]

    train, facts = documents("train.bin"), world.read_facts(out / "facts.tsv.xz")
    for story in STORIES.strip().split("\n\n"):
        assert train.count(story) == 2
    count = {}
    for document in train:
        count[document] = count.get(document, 0) + 1
    for fact in facts:
        written = [count.get(sentence, 0) for sentence in fact.sentences()]
        assert sum(written) == 3 * fact.times and max(written) <= fact.times
        assert "".join(fact.question(fact.held_out)) not in count
    for subject, group in world.by_subject(facts).items():
        entries = [n for document, n in count.items() if document.startswith(world.upper(subject) + ": ")
                   and all(fact.clause() in document for fact in group)]
        assert sum(entries) == 4 * group[0].times
    assert documents("valid.bin") == ["A held-out story.", "Another one."]
    held_out = {"".join(fact.question(fact.held_out)) for fact in facts}
    assert set(documents("valid-facts.bin")) <= held_out


def test_a_world_of_more_subjects_than_names_is_refused():
    with pytest.raises(SystemExit, match="30000 subjects were asked for, but the words make 24000 names"):
        world.build(1, n_people=2, n_things=30000)
