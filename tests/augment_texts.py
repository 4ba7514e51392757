"""Texts for the golden file of augmentation: prose in several styles, and Python source."""

PROSE = (
    "The quick brown dog ran across the old bridge because it wanted to reach the large garden before the sudden "
    "storm. A hawk circled over the cottage, and an elderly farmer watched it from his window.",
    "Researchers measured the temperature of the lake every morning. They noticed that the water was unusually "
    "warm, which surprised the entire team. An early explanation blamed a faulty thermometer.",
    '"Have you seen my spaniel?" the boy asked. His mother shook her head. "Look behind the sofa," she suggested, '
    '"or in the cottage."',
    "Dr. Smith bought a violin for $300 in St. Paul on 3 May 2019; it belonged to a composer. Visit "
    "https://example.org/shop for more details, or write to info@example.org.",
    "Hi folks, I purchased this blender last week and it's fantastic! The motor is extremely quiet, the jug is "
    "easy to clean and the manual is clear. I'd buy it again.",
    "Preheat the oven to 180 °C. Beat an egg with a cup of sugar until the mixture is almost white, then add the "
    "butter slowly. Bake the cake for 40 minutes; let it cool completely before you cut it. Serve it to your guests.",
    "The committee rejected the proposal after a long debate. Several members argued that the cost was enormous, "
    "and that an independent study should precede any decision. The chairman promised a prompt answer.",
    "In 1848 the physician opened a small hospital near the harbor. He treated sailors, laborers and orphans "
    "without charge. His assistant, a careful woman from Norway, kept an accurate record of every patient.",
    "A compiler translates a source file into machine instructions. It builds a tree, selects instructions, and "
    "then emits code for the target processor. Modern compilers usually apply several techniques that remove "
    "redundant operations.",
    "My grandmother's house stood on a hill above the village. We often spent the summers there, picking cherries "
    "and chasing the neighbor's cat around the barn. Nobody locked a door in those days.",
    "The central bank raised interest rates by half a percentage point yesterday. Economists had expected a "
    "smaller step. Shares fell sharply; however, the currency gained against the dollar.",
    "Whales are mammals, not fish. They breathe air, feed their offspring with milk, and maintain a constant body "
    "temperature. An adult blue whale can weigh approximately 150 tonnes. Sailors once hunted them with rifles and "
    "lances.",
    "To replace the battery, remove the two screws on the back and lift the cover gently. Disconnect the cable "
    "immediately before you take the old battery out. This technique works for all models.",
    "The detective studied the letter for an hour. The ink was faded, the paper torn, and yet the signature was "
    "obviously genuine. He smiled, folded it carefully and called his driver.",
    "I think the film is too long (nearly three hours), but the actors are brilliant. The final scene made me "
    "weep. If you enjoyed the novel, you'll probably love it.",
    "The glacier has retreated rapidly since the beginning of the century. The main rivers that it feeds carry "
    "less water in autumn, and farmers in the valley must drill deeper wells. The hotel on the slope has closed.",
    "Dear Ms. Alvarez, thank you for your inquiry. The package apparently left our warehouse on Monday and should "
    "arrive within five days. Please accept our apology for the delay.",
    "The orchestra began with a cheerful overture. After the interval, a young pianist performed the concerto with "
    "remarkable skill; the audience applauded for roughly ten minutes.",
    "Set the flag `--dry-run` to see what would happen. The tool prints a list of the files that it would delete, "
    "e.g. /tmp/cache/old.bin, and a warning for each folder. Customers rely on it daily.",
    "At dawn the fishermen pushed their boat into the cold water. The vast bay was calm, so they rowed. By noon "
    "the nets were heavy, and the tired crew emptied a bottle on the way home.",
)

CODE = (
    "def mean(numbers):\n"
    '    """Arithmetic mean."""\n'
    "    # an empty list has no mean\n"
    "    total = 0.0\n"
    "    for number in numbers:\n"
    "        total += number  # plain sum\n"
    "    return total / len(numbers)\n",
    "import os\n"
    "\n"
    "\n"
    "def sizes(folder):\n"
    "    result = {}\n"
    "    for name in os.listdir(folder):\n"
    "        path = os.path.join(folder, name)  # not followed\n"
    "        result[name] = os.stat(path).st_size\n"
    "    return result\n",
    "#!/usr/bin/env python3\n"
    "# Prints the longest line.\n"
    "import sys\n"
    "\n"
    "\n"
    "def main():\n"
    "    longest = ''\n"
    "    with open(sys.argv[1]) as file:\n"
    "        for line in file:\n"
    "            # keep the first of equal ones\n"
    "            if len(line) > len(longest):\n"
    "                longest = line\n"
    "    print(longest, end='')\n"
    "\n"
    "\n"
    "main()\n",
    "def fibonacci(n):\n    a, b = 0, 1  # the first two\n    while a < n:\n        yield a\n        a, b = b, a + b\n",
    "class Stack:\n"
    "    # A list is enough.\n"
    "    def __init__(self):\n"
    "        self.items = []\n"
    "\n"
    "    def pop_all(self):\n"
    "        taken = self.items  # hand over the list itself\n"
    "        self.items = []\n"
    "        return taken\n",
    "def word_counts(text):\n"
    "    counts = {}  # by word\n"
    "    for word in text.split():\n"
    "        key = word.lower().strip('.,')\n"
    "        counts[key] = counts.get(key, 0) + 1  # noqa: SIM\n"
    "    return sorted(counts, key=lambda w: -counts[w])\n",
    "def bisect(values, wanted):\n"
    "    low = 0\n"
    "    high = len(values)\n"
    "    while low < high:\n"
    "        middle = (low + high) // 2  # cannot overflow in Python\n"
    "        if values[middle] < wanted:\n"
    "            low = middle + 1\n"
    "        else:\n"
    "            high = middle\n"
    "    return low\n",
    "def parse(lines):\n"
    "    # name = value\n"
    "    settings = {}\n"
    "    for line in lines:\n"
    "        name, _, value = line.partition('=')\n"
    "        if not value:\n"
    "            raise ValueError(f'bad line: {line}')\n"
    "        settings[name.strip()] = value.strip()\n"
    "    return settings\n",
    "async def fetch_all(session, urls):\n"
    "    pages = []\n"
    "    for url in urls:\n"
    "        async with session.get(url) as response:\n"
    "            body = await response.text()\n"
    "            pages.append(body)  # in order\n"
    "    return pages\n",
    "def matrix_product(left, right):\n"
    "    rows = len(left)\n"
    "    columns = len(right[0])\n"
    "    product = [[0] * columns for _ in range(rows)]\n"
    "    for i in range(rows):\n"
    "        for j in range(columns):\n"
    "            # inner product\n"
    "            product[i][j] = sum(x * y for x, y in zip(left[i], [r[j] for r in right]))\n"
    "    return product\n",
    "def retry(action, attempts=3):\n"
    "    error = None\n"
    "    for attempt in range(attempts):\n"
    "        try:\n"
    "            return action()\n"
    "        except OSError as failure:  # network trouble\n"
    "            error = failure\n"
    "    raise error\n",
    "import json\n"
    "\n"
    "# The format is ours.\n"
    "# Do not change it.\n"
    "\n"
    "\n"
    "def load(path):\n"
    "    with open(path, encoding='utf-8') as handle:\n"
    "        record = json.load(handle)\n"
    "    version = record.get('version', 1)\n"
    "    if version != 1:\n"
    "        raise ValueError(version)\n"
    "    return record\n",
    "def counter():\n"
    "    count = 0\n"
    "\n"
    "    def step():\n"
    "        nonlocal count\n"
    "        count += 1  # shared\n"
    "        return count\n"
    "\n"
    "    made = step  # a closure\n"
    "    return made\n",
    "def primes(limit):\n"
    "    # Sieve of Eratosthenes\n"
    "    is_prime = [True] * limit\n"
    "    found = []\n"
    "    for candidate in range(2, limit):\n"
    "        if is_prime[candidate]:\n"
    "            found.append(candidate)\n"
    "            for multiple in range(candidate * candidate, limit, candidate):\n"
    "                is_prime[multiple] = False\n"
    "    return found\n",
    "def flatten(tree):\n"
    "    flat = []\n"
    "    pending = [tree]\n"
    "    while pending:\n"
    "        node = pending.pop()\n"
    "        if isinstance(node, list):\n"
    "            pending.extend(reversed(node))  # keep the order\n"
    "        else:\n"
    "            flat.append(node)\n"
    "    return flat\n",
    "def title_case(text):\n"
    "    small = {'a', 'an', 'the', 'of'}\n"
    "    words = text.split()\n"
    "    # the first word is always capitalized\n"
    "    return ' '.join(w if i and w in small else w.title() for i, w in enumerate(words))\n",
    "def transpose(table):\n"
    "    header = table[0]\n"
    "    columns = {}\n"
    "    for place, name in enumerate(header):\n"
    "        # rows may be short\n"
    "        columns[name] = [row[place] for row in table[1:] if place < len(row)]\n"
    "    return columns\n",
    "def describe(value):\n"
    "    match value:\n"
    "        case [first, *rest]:\n"
    "            size = 1 + len(rest)  # at least one\n"
    "            return 'list', first, size\n"
    "        case _:\n"
    "            return 'other', value, 0\n",
    "# type: ignore\n"
    "def clean(rows):\n"
    "    good = []\n"
    "    bad = 0\n"
    "    for row in rows:\n"
    "        if row is None:  # missing\n"
    "            bad += 1\n"
    "            continue\n"
    "        good.append(row)\n"
    "    return good, bad\n",
    "def grüße(namen):\n"
    "    texte = []  # für alle\n"
    "    for name in namen:\n"
    "        text = 'Hallo, ' + name + '!'  # schön\n"
    "        texte.append(text)\n"
    "    return texte\n",
)
