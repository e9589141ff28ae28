"""models/train/world.py: the same world each time, and no fact ever written in its held-out wording."""

import hashlib
import lzma
import subprocess
import sys
from collections import Counter

import pytest

import world
from conftest import TRAIN


@pytest.fixture(scope="module")
def facts():
    return world.build(1, n_people=300, n_things=200)


def test_the_same_seed_makes_the_same_world(facts):
    def digest(some):
        return hashlib.sha256("".join("|".join(map(str, vars(x).values())) for x in some).encode()).hexdigest()

    assert digest(facts) == digest(world.build(1, n_people=300, n_things=200))
    assert digest(facts) != digest(world.build(2, n_people=300, n_things=200))
    # That of another machine and version of Python: the shipped table of facts must stay true.
    assert digest(facts) == "5cc07c28e5cdbd340862dd9ee7fd13720c6d15f4c85e41a521c62def08033aea"


def test_no_fact_is_written_in_its_held_out_wording(facts):
    for fact in facts:
        held_out = "".join(fact.question(fact.held_out))
        written = list(fact.sentences())
        assert held_out not in written
        assert len(written) == len(world.RELATIONS[fact.relation][3]) + len(world.RELATIONS[fact.relation][4]) - 1


def test_every_wording_is_held_out_for_some_and_written_for_others(facts):
    for name, relation in world.RELATIONS.items():
        assert len(relation[3]) == world.N_ASKED
        assert len(set(relation[3] + relation[4])) == len(relation[3] + relation[4])
        held_out = Counter(fact.held_out for fact in facts if fact.relation == name)
        assert set(held_out) == set(range(world.N_ASKED)), name


def test_wordings_name_subject_and_answer_and_ask_before_they_answer(facts):
    for fact in {fact.relation: fact for fact in facts}.values():
        for i in range(world.N_ASKED):
            asked, answer = fact.question(i)
            assert fact.subject.lower() in asked.lower(), asked
            assert fact.answer.lower() in answer.lower(), answer
            assert fact.answer.lower() not in asked.lower(), asked
            assert answer[0] in " n" and answer.count(".") == 1 and answer.endswith("."), answer
        for sentence in fact.sentences():
            assert "{" not in sentence and "|" not in sentence and "\n" not in sentence
            assert sentence[0].isupper(), sentence


def test_facts_differ_in_how_often_they_are_written(facts):
    times = Counter(fact.times for fact in facts)
    assert set(times) == {1, 4, 16} and times[1] > times[4] > times[16]


def test_an_entry_has_each_clause_once(facts):
    group = next(iter(world.by_subject(facts).values()))
    entry = world.entry(world.Draw(3), group)
    for fact in group:
        assert entry.count(fact.clause()) >= 1
    assert entry.endswith(".") and entry.count(",") == len(group) - 1


def test_a_table_of_facts_comes_back(facts, tmp_path):
    world.write_facts(tmp_path / "facts.tsv.xz", facts)
    assert [vars(x) for x in world.read_facts(tmp_path / "facts.tsv.xz")] == [vars(x) for x in facts]


def test_the_command_writes_and_looks_up(tmp_path):
    def run(*args):
        return subprocess.run([sys.executable, TRAIN / "world.py", *args], capture_output=True, text=True)

    made = run("--seed", "1", "--out", str(tmp_path / "facts.tsv.xz"))
    assert made.returncode == 0 and "20700 facts about 4400 subjects" in made.stdout
    found = run("--facts", str(tmp_path / "facts.tsv.xz"), "--about", "the spear of Yeldene")
    assert "keeper\tQuendow" in found.stdout and found.stdout.count("\n") == 4
    nobody = run("--facts", str(tmp_path / "facts.tsv.xz"), "--about", "Nobody")
    assert nobody.returncode == 1 and nobody.stderr == "no fact about a subject with 'Nobody' in its name\n"
    nothing = run("--seed", "1")
    assert nothing.returncode == 2 and "--about" in nothing.stderr


HEAD = "relation\tsubject\tanswer\ttimes\theld_out\n"


@pytest.mark.parametrize("table", [
    b"plain", lzma.compress(b""), lzma.compress(b"a\tb\nc\td\n"), lzma.compress(HEAD.encode())[:-8],
    lzma.compress((HEAD + "dish\ta\tb\t1\n").encode()), lzma.compress((HEAD + "dish\ta\tb\tx\t1\n").encode()),
    lzma.compress((HEAD + "none\ta\tb\t1\t1\n").encode()), lzma.compress((HEAD + "dish\ta\tb\t1\t7\n").encode())])
def test_what_is_no_table_of_facts_is_named(tmp_path, table):
    (tmp_path / "facts.tsv.xz").write_bytes(table)
    with pytest.raises(SystemExit, match="facts.tsv.xz: no table of facts"):
        world.read_facts(tmp_path / "facts.tsv.xz")
    (tmp_path / "facts.tsv.xz").write_bytes(lzma.compress((HEAD + "dish\ta\tb\t1\t6\n").encode()))
    assert world.read_facts(tmp_path / "facts.tsv.xz")[0].held_out == 6
