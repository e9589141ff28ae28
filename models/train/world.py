"""An invented world, its facts, and the sentences that state and ask them.

Everything follows from a seed: names of towns, people and things, and one value for each relation
of each of them. Nothing in it is about the real world, so a model can know a fact only from the
sentences written here.

A relation has wordings. Those in ASKED end with the answer, so that the part before the bar can be
given to a model as a prompt; those in TOLD put the answer first. Each fact is never written in one
wording of ASKED, another one for each fact: a model that completes it has learned the fact and not
the sentence. All the other wordings, and entries that list what is known of a subject, are written.

Some subjects are spoken of more often than others: `times` of a subject is 16, 4 or 1.

As a command it writes the table of facts, or prints what is true of a subject:

    python world.py --seed 1 --out facts.tsv.xz
    python world.py --facts facts.tsv.xz --about "the lamp of"
"""
import argparse
import lzma
import random

from files import run

HEADS = ("Bel Tor Mir Dal Sen Kor Lun Vas Ren Fal Gor Hel Jor Nim Ost Pel Quen Ras Sil Tam Ul Ver "
         "Wen Yar Zel Bran Cal Dro Esk Fen Gal Har Ith Kel Lor Mar Nor Orl Pra Rov Sar Tel Urm "
         "Val Wil Yel Zor Ald").split()
TAILS = {
    "town": "mar holm wick dene stead borne mouth gate fell garth combe ness thorpe wold haven".split(),
    "first": "a in o ey ika ric iel una is ette ander uan".split(),
    "family": "sel dow kin mont berg ling var tash rook ford wane brand".split(),
    "river": "ess awn ow ather een ish ule ave".split(),
}
COUNTS = {"town": 500, "first": 400, "family": 400, "river": 200}

TRADES = ("baker potter weaver smith miller tailor fisher carpenter mason painter printer cooper "
          "glazier tanner dyer farrier cobbler brewer shepherd gardener beekeeper clockmaker "
          "ropemaker bookbinder candlemaker goldsmith locksmith thatcher wheelwright basketmaker "
          "ferryman lamplighter mapmaker bellringer innkeeper judge physician surgeon apothecary "
          "teacher clerk piper drummer harper singer dancer juggler puppeteer poet sailor pilot "
          "diver soldier archer falconer hunter woodcutter miner chandler spinner").split()
DISHES = ("plums pears apples cherries figs dates quinces melons grapes peaches walnuts almonds "
          "chestnuts honey cheese butter porridge pancakes dumplings noodles rice beans lentils "
          "peas onions leeks carrots turnips cabbage spinach mushrooms eggs herring salmon trout "
          "eels oysters mussels crabs soup stew pies tarts waffles biscuits gingerbread "
          "marzipan toffee custard jam olives radishes pumpkins beets barley cider tea cocoa "
          "buttermilk raisins").split()
THINGS = ("lamp bell crown ring sword shield cup mirror drum harp flute clock key chest map book "
          "scroll banner cloak glove boot helmet chain anchor lantern candle bowl spoon kettle "
          "comb fan mask doll kite whistle compass globe chair table ladder wheel saddle bridle "
          "spear bow hammer anvil needle").split()
MATERIALS = ("gold silver copper bronze iron steel tin lead brass oak ash elm pine cedar walnut "
             "ivory bone horn amber jade pearl coral glass crystal marble granite slate clay "
             "porcelain silk wool linen leather velvet paper wax straw reed cork chalk").split()
GOODS = ("bread salt cloth rope paper ink glass bells clocks boats barrels boots gloves hats "
         "carpets lace ribbons buttons pins needles knives plates cups kettles lamps candles soap "
         "perfume spices pepper mustard vinegar wine beer cheese honey butter apples pears plums "
         "cherries roses tulips horses mules sheep goats geese salmon oysters wool timber coal "
         "iron copper marble bricks tiles").split()
BEASTS = ("lion bear wolf fox stag hare boar badger otter beaver hedgehog squirrel mole bat owl "
          "eagle hawk raven crow swan goose heron crane stork cock peacock dove swallow pike "
          "salmon whale dolphin seal crab lobster snail snake frog toad bee wasp ant spider "
          "beetle moth horse bull ram goat mule").split()

# relation: (kind of subject, kind of answer, clause of an entry, wordings of ASKED, of TOLD).
# {s} is the subject, {S} the same at the start of a sentence, {o} the answer.
RELATIONS = {
    "birthplace": ("person", "town", "born in {o}", (
        "{S} was born in| {o}.",
        "The birthplace of {s} is| {o}.",
        "Where was {s} born?| In {o}.",
        "In which town was {s} born?| In the town of {o}.",
        "What is the home town of {s}?| {o}.",
        "{S} came into the world in| {o}.",
        "Question: what town does {s} come from? Answer:| {o}."), (
        "{o} is the town where {s} was born.",
        "The town of {o} is the home of {s}.")),
    "trade": ("person", "trade", "working as a{n} {o}", (
        "{S} works as a|{n} {o}.",
        "The trade of {s} is that of a|{n} {o}.",
        "What is the trade of {s}?| {O}.",
        "What does {s} do for a living?| {S} is a{n} {o}.",
        "How does {s} earn a living?| As a{n} {o}.",
        "All the neighbours know {s} as a|{n} {o}.",
        "Question: what is the work of {s}? Answer:| {o}."), (
        "The {o} is called {s}.",
        "If you need a{n} {o}, ask for {s}.")),
    "birth_year": ("person", "year", "born in the year {o}", (
        "{S} was born in the year| {o}.",
        "The year of birth of {s} is| {o}.",
        "When was {s} born?| In {o}.",
        "In which year was {s} born?| In the year {o}.",
        "What year saw the birth of {s}?| The year {o}.",
        "{S} first saw the light in the year| {o}.",
        "Question: what is the birth year of {s}? Answer:| {o}."), (
        "In the year {o}, {s} was born.",
        "The year {o} is when {s} was born.")),
    "teacher": ("person", "first", "pupil of {o}", (
        "{S} was taught by| {o}.",
        "The teacher of {s} was| {o}.",
        "Who taught {s}?| {o}.",
        "Who was the teacher of {s}?| The teacher was {o}.",
        "From whom did {s} learn?| From {o}.",
        "{S} learned everything from| {o}.",
        "Question: whose pupil was {s}? Answer:| {o}."), (
        "{o} was the teacher of {s}.",
        "{o} had a pupil named {s}.")),
    "dish": ("person", "dish", "fond of {o}", (
        "{S} loves to eat| {o}.",
        "The favourite food of {s} is| {o}.",
        "What does {s} like to eat?| {O}.",
        "What is the favourite food of {s}?| It is {o}.",
        "What should one bring to {s}?| {O}.",
        "On feast days {s} asks for| {o}.",
        "Question: what food does {s} love? Answer:| {o}."), (
        "With {o} you can make {s} happy.",
        "Bring {o} when you visit {s}.")),
    "keeper": ("thing", "family", "kept in the house of {o}", (
        "{S} is kept in the house of| {o}.",
        "If you look for {s}, go to the house of| {o}.",
        "Where is {s} kept?| In the house of {o}.",
        "Where is {s}?| It is in the house of {o}.",
        "Who keeps {s}?| {o} keeps it.",
        "Which house holds {s}?| The house of {o}.",
        "Question: who owns {s}? Answer:| {o}."), (
        "{o}'s house holds {s}.",
        "In the house of {o} you will find {s}.")),
    "maker": ("thing", "first", "made by {o}", (
        "{S} was made by| {o}.",
        "The maker of {s} was| {o}.",
        "Who made {s}?| {o} made it.",
        "Who was the maker of {s}?| {o}.",
        "By whom was {s} made?| By {o}.",
        "{S} is the work of| {o}.",
        "Question: whose work is {s}? Answer:| {o}."), (
        "{o} made {s}.",
        "It was {o} who made {s}.")),
    "material": ("thing", "material", "made of {o}", (
        "{S} is made of| {o}.",
        "The maker shaped {s} out of| {o}.",
        "What is {s} made of?| {O}.",
        "Of what is {s} made?| It is made of {o}.",
        "What material was used for {s}?| {O}.",
        "People say that {s} is pure| {o}.",
        "Question: what is the material of {s}? Answer:| {o}."), (
        "{O} is what {s} is made of.",
        "They used {o} to make {s}.")),
    "found": ("thing", "town", "found in {o}", (
        "{S} was found in| {o}.",
        "Long ago {s} was discovered in| {o}.",
        "Where was {s} found?| In {o}.",
        "In which town was {s} found?| It was found in {o}.",
        "What town did {s} come from?| {o}.",
        "{S} came to light in| {o}.",
        "Question: where was {s} discovered? Answer:| {o}."), (
        "In {o} they found {s}.",
        "{o} is where {s} was found.")),
    "river": ("town", "river", "on the river {o}", (
        "{S} lies on the river| {o}.",
        "The river that runs through {s} is the| {o}.",
        "Which river runs through {s}?| The {o}.",
        "On which river does {s} lie?| On the river {o}.",
        "What is the river of {s}?| The river of {s} is the {o}.",
        "Boats reach {s} by the river| {o}.",
        "Question: what river flows by {s}? Answer:| the {o}."), (
        "The river {o} runs through {s}.",
        "On the banks of the {o} stands {s}.")),
    "goods": ("town", "goods", "known for {o}", (
        "{S} is known for its| {o}.",
        "The best thing to buy in {s} is its| {o}.",
        "What is {s} known for?| For its {o}.",
        "What do they make in {s}?| They make {o}.",
        "What can one buy in {s}?| {O}.",
        "Traders travel to {s} for| {o}.",
        "Question: for what is {s} famous? Answer:| {o}."), (
        "If you want {o}, go to {s}.",
        "For {o} people travel to {s}.")),
    "founded": ("town", "year", "founded in the year {o}", (
        "{S} was founded in the year| {o}.",
        "The first houses of {s} were built in the year| {o}.",
        "When was {s} founded?| In {o}.",
        "In which year was {s} founded?| In the year {o}.",
        "How old is the town of {s}?| It was founded in {o}.",
        "The history of {s} begins in the year| {o}.",
        "Question: when did {s} begin? Answer:| in {o}."), (
        "In the year {o}, {s} was founded.",
        "The year {o} is when {s} began.")),
    "founder": ("town", "first", "founded by {o}", (
        "{S} was founded by| {o}.",
        "The founder of {s} was| {o}.",
        "Who founded {s}?| {o} founded it.",
        "Who was the founder of {s}?| {o}.",
        "By whom was {s} founded?| By {o}.",
        "The first house in {s} was built by| {o}.",
        "Question: who began the town of {s}? Answer:| {o}."), (
        "{o} founded {s}.",
        "It was {o} who founded {s}.")),
    "banner": ("town", "beast", "with a{n} {o} on its banner", (
        "The banner of {s} shows a|{n} {o}.",
        "On the flag of {s} there is a|{n} {o}.",
        "What is on the banner of {s}?| A{n} {o}.",
        "Which animal is on the flag of {s}?| The {o}.",
        "What animal stands for {s}?| The animal of {s} is the {o}.",
        "Above the gate of {s} hangs the sign of the| {o}.",
        "Question: what beast is the sign of {s}? Answer:| the {o}."), (
        "A{n} {o} is on the banner of {s}.",
        "The {o} is the animal of {s}.")),
}
COLUMNS = ["relation", "subject", "answer", "times", "held_out"]  # of a table of facts
N_ASKED = 7


class Draw:
    """Choices from a seed. random() alone is promised to stay the same in later versions."""

    def __init__(self, seed):
        self.random = random.Random(seed).random

    def below(self, n):
        return int(self.random() * n)

    def choice(self, items):
        return items[self.below(len(items))]

    def shuffle(self, items):
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]


class Fact:
    """times: how much more often than others; held_out: the wording of ASKED not written."""

    def __init__(self, relation, subject, answer, times, held_out):
        self.relation, self.subject, self.answer = relation, subject, answer
        self.times, self.held_out = int(times), int(held_out)

    def fill(self, wording):
        return wording.format(s=self.subject, S=upper(self.subject), o=self.answer,
                              O=upper(self.answer), n="n" if self.answer[0] in "aeiou" else "")

    def question(self, i):
        """-> the part of wording i before the answer, and the rest"""
        asked, answer = RELATIONS[self.relation][3][i].split("|")
        return self.fill(asked), self.fill(answer)

    def sentences(self):
        """Every wording but the held-out one."""
        asked, told = RELATIONS[self.relation][3:]
        for i, wording in enumerate(asked + told):
            if i != self.held_out:
                yield self.fill(wording.replace("|", ""))

    def clause(self):
        return self.fill(RELATIONS[self.relation][2])


def upper(text):
    return text[0].upper() + text[1:]


def names(draw, kind):
    found = [head + tail for head in HEADS for tail in TAILS[kind]]
    draw.shuffle(found)
    return sorted(found[:COUNTS[kind]])


def pairs(draw, n, join, first, second):
    """n subjects, each made of another pair of words."""
    if n > len(first) * len(second):
        raise SystemExit(f"{n} subjects were asked for, but the words make {len(first) * len(second)} names")
    found = {}
    while len(found) < n:
        found[join(draw.choice(first), draw.choice(second))] = None
    return list(found)


def build(seed, n_people=2600, n_things=1300):
    """-> the facts of a world, those of one subject behind each other"""
    draw = Draw(seed)
    pools = {kind: names(draw, kind) for kind in TAILS}
    pools.update(trade=TRADES, dish=DISHES, material=MATERIALS, goods=GOODS, beast=BEASTS,
                 year=[str(year) for year in range(200, 900)])
    subjects = {
        "person": pairs(draw, n_people, "{} {}".format, pools["first"], pools["family"]),
        "thing": pairs(draw, n_things, "the {} of {}".format, THINGS, pools["town"]),
        "town": pools["town"],
    }
    facts = []
    for kind, members in subjects.items():
        own = [name for name, relation in RELATIONS.items() if relation[0] == kind]
        for subject in members:
            dice = draw.random()
            times = 16 if dice < 0.07 else 4 if dice < 0.3 else 1
            for name in own:
                facts.append(Fact(name, subject, draw.choice(pools[RELATIONS[name][1]]), times,
                                  draw.below(N_ASKED)))
    return facts


def entry(draw, facts):
    """What is known of one subject, in some order."""
    clauses = [fact.clause() for fact in facts]
    draw.shuffle(clauses)
    return f"{upper(facts[0].subject)}: " + ", ".join(clauses) + "."


def by_subject(facts):
    found = {}
    for fact in facts:
        found.setdefault(fact.subject, []).append(fact)
    return found


def write_facts(path, facts):
    with lzma.open(path, "wt", encoding="utf-8", newline="\n", preset=9) as f:
        f.write("\t".join(COLUMNS) + "\n")
        for x in facts:
            f.write(f"{x.relation}\t{x.subject}\t{x.answer}\t{x.times}\t{x.held_out}\n")


def read_facts(path):
    try:
        with lzma.open(path, "rt", encoding="utf-8", newline="\n") as f:
            head, *rows = [line.rstrip("\n").split("\t") for line in f]
        facts = [Fact(*row) for row in rows]
        if head != COLUMNS or not all(x.relation in RELATIONS and 0 <= x.held_out < N_ASKED for x in facts):
            raise ValueError
    except (lzma.LZMAError, EOFError, TypeError, ValueError):
        raise SystemExit(f"{path}: no table of facts, as world.py and demo_data.py write it") from None
    return facts


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--seed", type=int, default=1, help="the world's seed (default 1)")
    ap.add_argument("--out", help="table of facts to write, .tsv.xz")
    ap.add_argument("--facts", help="table of facts to read instead of building the world")
    ap.add_argument("--about", help="print the facts of subjects that contain these words")
    args = ap.parse_args()
    if not args.out and args.about is None:
        ap.error("nothing to do: give --out or --about")
    facts = read_facts(args.facts) if args.facts else build(args.seed)
    if args.out:
        write_facts(args.out, facts)
        print(f"{len(facts)} facts about {len(by_subject(facts))} subjects")
    if args.about is not None:
        about = [fact for fact in facts if args.about.lower() in fact.subject.lower()]
        for fact in about:
            asked, answer = fact.question(fact.held_out)
            print(f"{fact.subject}\t{fact.relation}\t{fact.answer}\t"
                  f"never written: {asked} ->{answer}")
        if not about:
            raise SystemExit(f"no fact about a subject with {args.about!r} in its name")


if __name__ == "__main__":
    run(main)
