# ruff: noqa: E501 (sentences and table rows read better unbroken)
"""The little world and the prompt families from which the demo target learns its English.

A `Scene` draws people, a place, a thing, an animal and so on; a family turns a scene into a prompt and an answer that
refers back to what the prompt names. Records carry facts (the lantern is brass, otters live in the reeds), and
which of several wordings is used depends mostly on the slots: a greedy decoder, which always takes the likeliest
wording, then still answers differently from prompt to prompt. These answers train the target and nothing else: the
answers in the package are the target's own.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

Record = tuple[str, ...]

# A chosen wording follows the slots this often; the rest is drawn freely, so that the target keeps some doubt.
WORDING_FOLLOWS_SLOTS = 0.85


def _table(text: str) -> list[Record]:
    return [tuple(part.strip() for part in line.split("|")) for line in text.strip().splitlines()]


WOMEN = ["Mira", "Anna", "Ida", "Rosa", "Clara", "Edith", "Nora", "Tilda", "Greta", "Selma", "Vera", "Lucia"]
MEN = [
    "Tomas",
    "Emil",
    "Jonas",
    "Felix",
    "Oskar",
    "Bruno",
    "Anton",
    "Hugo",
    "Viktor",
    "Leon",
    "Karl",
    "Simon",
]
TOWNS = [
    "Arden",
    "Belmora",
    "Corvin",
    "Dunmere",
    "Eastholm",
    "Farrow",
    "Glenby",
    "Harwick",
    "Ilmar",
    "Jorvik",
    "Kelden",
    "Lowmoor",
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
TIMES = [
    "at dawn",
    "before breakfast",
    "at noon",
    "in the late afternoon",
    "at dusk",
    "after dark",
    "at midnight",
]

# name | where | what one sees | what one hears | what one smells | how it feels
PLACES = _table("""
lighthouse|on the cliff|a white tower with a red door|waves beating against the rocks|salt and wet stone|lonely but bright
harbour|by the bay|rows of blue fishing boats|ropes creaking in the wind|tar and fresh fish|busy and loud
library|behind the town hall|shelves that reach the ceiling|pages turning slowly|old paper and wax|calm and serious
orchard|south of the village|long lines of apple trees|bees working in the grass|ripe fruit and warm earth|sweet and sleepy
market|in the main square|stalls under striped cloth|traders calling their prices|bread, pepper and oranges|crowded and merry
mill|beside the river|a wooden wheel turning in the stream|stones grinding the grain|flour and damp wood|steady and honest
monastery|above the valley|a narrow bell tower|monks singing softly|candles and cold air|silent and very old
workshop|at the end of the lane|tools hanging in neat order|hammers ringing on iron|oil and sawdust|warm and full of work
station|north of the bridge|two tracks and a round clock|whistles and hurried steps|coal smoke and coffee|restless and grey
castle|on the green hill|broken walls covered with ivy|owls calling from the tower|moss and dust|proud and half forgotten
garden|inside the old walls|paths of white gravel|water falling into a basin|roses and mint|gentle and well kept
island|far from the coast|black sand and low bushes|seals barking on the shore|seaweed and smoke|wild and free
""")

# name | made of | what it is for | its special part | what goes wrong with it | how to care for it
THINGS = _table("""
lantern|brass|light the way at night|a small glass door|the wick burns too low|trim the wick and wipe the glass
compass|copper|find the north|a trembling needle|the needle sticks|keep it away from iron
violin|maple wood|play for dancers|four thin strings|a string snaps|loosen the bow after playing
kettle|iron|boil water for tea|a curved spout|the lid rattles|empty it and let it dry
map|linen paper|plan a long journey|a blue line for the river|the folds tear|roll it instead of folding it
clock|walnut wood|keep the hours|a silver pendulum|it runs slow in winter|wind it every evening
boat|oak planks|cross the lake|a patched sail|water seeps through the seams|paint the hull each spring
umbrella|black silk|stay dry in a storm|a carved handle|the ribs bend|open it to dry after rain
camera|steel|keep a moment for ever|a round lens|dust gets on the film|cover the lens with a soft cloth
key|bronze|open the north gate|three uneven teeth|it turns stiffly|rub it with a drop of oil
basket|willow|carry eggs to town|a braided handle|the bottom sags|hang it in a dry place
telescope|brass|watch the moon|a long folding tube|the picture blurs|clean the lens with a feather
drum|goat skin|call people together|a painted rim|the skin goes slack|warm it gently near the fire
""")

# name | temper | food | habit | home | sound
ANIMALS = _table("""
fox|clever|berries and mice|listens before every step|a den under the roots|a short bark
otter|playful|fish and crabs|floats on its back|the reeds by the river|a bright whistle
owl|patient|mice|turns its head without a sound|a hollow oak|a low hoot
donkey|stubborn|hay and thistles|stops whenever it likes|the stable|a loud bray
raven|curious|almost anything|collects shiny buttons|the top of the tower|a rough croak
hedgehog|shy|beetles and worms|rolls into a ball|a heap of leaves|a quiet snuffle
goat|bold|leaves and bark|climbs on every wall|the hillside|a cheeky bleat
heron|calm|frogs and fish|stands on one leg for hours|the edge of the marsh|a harsh cry
cat|proud|fish and cream|sleeps in the warmest spot|the kitchen shelf|a soft purr
badger|sturdy|roots and honey|digs long tunnels|the bank of the stream|a deep grunt
""")

# trade | tool | what they do | where the skill shows | saying
JOBS = _table("""
baker|a long wooden paddle|bakes bread before sunrise|an even crust|Good dough cannot be hurried
sailor|a coil of rope|steers by the stars|a steady hand on the wheel|The sea forgives nobody twice
clockmaker|a fine screwdriver|mends old clocks|tiny gears that never slip|Every minute is made by hand
gardener|a sharp spade|grows vegetables and roses|straight rows in spring|Water the roots and not the leaves
teacher|a piece of chalk|explains hard things simply|questions that make pupils think|Ask first and answer later
carpenter|a heavy plane|builds tables and doors|joints without a single nail|Measure twice and cut once
doctor|a worn leather bag|visits the sick on foot|a quiet voice at the bedside|Listen before you look
painter|a broad brush|paints walls and portraits|shadows that look alive|Start with the light
shepherd|a crooked staff|keeps sheep on the hills|a whistle that every dog knows|Count them at night and again at dawn
blacksmith|a blunt hammer|shapes iron in the fire|blades that keep their edge|Strike while it glows
""")

# mood | gesture | reason they give | advice
MOODS = _table("""
happy|laughed out loud|everything had gone better than planned|share the good news with someone
nervous|tapped the table with two fingers|so much could still go wrong|take three slow breaths
tired|rubbed both eyes|the night had been far too short|rest for an hour and start again
proud|stood up very straight|the hard work had finally paid off|thank the people who helped you
angry|shut the door with a bang|nobody had asked first|walk around the block before you speak
sad|looked down at the floor|an old friend had moved away|write a long letter to your friend
curious|leaned closer to look|nothing like it had been seen before|make a list of your questions
lonely|stared out of the window|the house had grown too quiet|invite the neighbours for soup
""")

# weather | sentence | advice | night | degrees low | degrees high
WEATHERS = _table("""
rain|grey clouds hang low and it rains without a break|take a good coat|the rain slowly turns to drizzle|8|14
snow|thick flakes cover the roofs and the roads|walk slowly and wear wool|the frost grows sharp under clear stars|1|4
sunshine|the sky stays blue from morning to evening|bring a hat and enough water|the air stays mild and still|19|28
fog|a white fog hides everything beyond the gate|keep to the marked paths|the fog lifts for an hour and returns|5|11
wind|a strong wind pushes the clouds across the hills|tie down anything loose|the gusts grow weaker near the coast|9|16
thunder|dark towers of cloud build up and thunder rolls|stay away from tall trees|lightning flickers far away|16|24
frost|the puddles freeze and every branch turns white|cover the young plants|the cold deepens until sunrise|2|6
""")

# trouble | what helps | lesson
TROUBLES = _table("""
the bridge had been washed away|tied two ropes across the water and crossed one by one|patience is stronger than haste
the bell had stopped ringing|climbed up and freed the frozen wheel with warm oil|small things hold great things together
the last bread was gone|shared some soup with the neighbours and baked again at night|what you share comes back to you
a stranger had lost the way|drew a simple map and walked along as far as the crossing|a good guide is worth more than gold
the well had run dry|dug beside the old willow until clear water came|ask the oldest tree for advice
the roof had begun to leak|laid new boards over the hole before the next storm|repair the roof while the sun shines
the lamp had gone out|collected dry twigs and lit a fire on the rocks|even a small light can guide a ship
the letter had never arrived|asked at every door until somebody found it|a careful question opens many doors
the goats had run into the hills|followed the prints and called them with salt|whoever stays calm finds the path
""")

# dish | four ingredients | first step | last step | serve with | minutes
DISHES = _table("""
onion soup|onions, butter, broth, dry bread|fry the onions until they are brown|float the bread on top|strong cheese|40
apple cake|apples, flour, eggs, sugar|cut the apples into thin slices|bake it until the edges turn gold|cold cream|55
pea stew|peas, carrots, bacon, thyme|soak the peas for a night|let it simmer on a low fire|brown bread|90
pancakes|flour, milk, eggs, salt|beat the eggs with the milk|turn each one when bubbles appear|plum jam|20
fish pie|cod, leeks, cream, potatoes|poach the fish in the cream|spread the mashed potatoes over it|green beans|50
potato salad|potatoes, cucumbers, vinegar, mustard|boil the potatoes in their skins|mix all while it is still warm|smoked sausage|35
lentil curry|lentils, garlic, ginger, tomatoes|roast the spices in a dry pan|stir until it is thick|plain rice|30
""")
GOODS = ["apples", "candles", "nails", "eggs", "ribbons", "stamps", "oranges", "buttons", "bricks", "shells"]
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "grey", "silver"]


def article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass
class Scene:
    """One draw of every slot; the turns of one conversation share it."""

    rng: random.Random
    hero: str = ""
    friend: str = ""

    def __post_init__(self) -> None:
        self.hero = self.rng.choice(WOMEN + MEN)
        self.friend = self.rng.choice([name for name in WOMEN + MEN if name != self.hero])
        self.town, self.town2 = self.rng.sample(TOWNS, 2)
        self.day, self.time, self.colour = (self.rng.choice(words) for words in (DAYS, TIMES, COLOURS))
        self.place, self.place2 = self.rng.sample(PLACES, 2)
        self.thing, self.thing2 = self.rng.sample(THINGS, 2)
        self.animal, self.animal2 = self.rng.sample(ANIMALS, 2)
        self.job, self.mood, self.weather = (self.rng.choice(table) for table in (JOBS, MOODS, WEATHERS))
        self.trouble, self.dish = self.rng.choice(TROUBLES), self.rng.choice(DISHES)
        self.good, self.good2 = self.rng.sample(GOODS, 2)

    @property
    def she(self) -> str:
        return "she" if self.hero in WOMEN else "he"

    @property
    def her(self) -> str:
        return "her" if self.hero in WOMEN else "his"

    def say(self, slot: str | Record, *wordings: str) -> str:
        """One of the wordings, mostly decided by the slot's name (and so by what the prompt says)."""
        word = slot if isinstance(slot, str) else slot[0]
        if self.rng.random() > WORDING_FOLLOWS_SLOTS:
            return self.rng.choice(wordings)
        return wordings[(ord(word[0]) + 3 * len(word) + ord(word[-1])) % len(wordings)]

    def ask(self, *wordings: str) -> str:
        """One wording of a prompt, drawn freely."""
        return self.rng.choice(wordings)


# Sentences that several families share: how a place looks, what a thing is for, how somebody feels.


def look(s: Scene, place: Record) -> str:
    _, where, sight, sound, smell, feeling = place
    return s.say(
        place,
        f"The {place[0]} stands {where}, and the first thing one sees is {sight}. You can hear {sound}.",
        f"{capital(where)} lies the {place[0]}. It smells of {smell}, and there is always the sound of {sound}.",
        f"It is {feeling} there: {sight}, {sound}, and a smell of {smell}.",
        f"Everybody knows the {place[0]} {where}, with {sight}. The air smells of {smell}.",
    )


def about_thing(s: Scene, thing: Record) -> str:
    name, stuff, use, part, trouble, _ = thing
    return s.say(
        thing,
        f"The {name} is made of {stuff} and has {part}. It helps people {use}.",
        f"It is a fine {name} of {stuff}, with {part}, and it can {use}.",
        f"People use the {name} to {use}. Its {stuff} is old, and {trouble} now and then.",
        f"With {part} and a body of {stuff}, the {name} was made to {use}.",
    )


def about_animal(s: Scene, animal: Record) -> str:
    name, temper, food, habit, home, sound = animal
    return s.say(
        animal,
        f"The {name} is {temper} and lives in {home}. It eats {food}.",
        f"A {temper} {name} {habit}, and its voice is {sound}.",
        f"In {home} lives the {name}, which {habit}. It likes {food}.",
    )


def feeling(s: Scene, name: str) -> str:
    mood, gesture, reason, _ = s.mood
    return s.say(
        s.mood,
        f"{name} was {mood} and {gesture}, because {reason}.",
        f"{name} {gesture}. It was plain that {reason}.",
        f"Because {reason}, {name} felt {mood} and {gesture}.",
    )


def sky(s: Scene) -> str:
    return s.say(
        s.weather,
        f"Outside, {s.weather[1]}.",
        f"{capital(s.weather[1])}, so {s.weather[2]}.",
        f"There is {s.weather[0]} today: {s.weather[1]}.",
    )


def solved(s: Scene, who: str) -> str:
    trouble, fix, _ = s.trouble
    return s.say(
        s.trouble,
        f"One day {trouble}. {who} {fix}.",
        f"Then {trouble}, and nobody knew what to do. In the end {who} {fix}.",
        f"But {trouble}. So {who} {fix}, and people still talk about it.",
    )


# The families. Each takes a scene and returns (prompt, answer).


def story(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Tell me a short story", "Write a story", "I would like a story")
    prompt += (
        f" about {s.hero} the {s.job[0]} and the {s.thing[0]} in the {s.place[0]}. {s.hero} is {s.mood[0]}."
    )
    prompt += f" It happens in {s.town}. In it {s.trouble[0]}."
    start = s.say(
        s.job,
        f"{s.hero} was a {s.job[0]} from {s.town}, who {s.job[2]}.",
        f"Long ago there lived a {s.job[0]} called {s.hero}, with {s.job[1]} always near.",
        f"In the {s.place[0]} worked {s.hero}, a {s.job[0]} known for {s.job[3]}.",
    )
    parts = [start, look(s, s.place), feeling(s, s.hero), solved(s, s.hero), about_thing(s, s.thing)]
    end = s.say(
        s.mood, f"{s.hero} smiled and said that {s.trouble[2]}.", f"Since then they say: {s.trouble[2]}."
    )
    return prompt, " ".join([*parts, end])


def fable(s: Scene) -> tuple[str, str]:
    one, two = s.animal, s.animal2
    prompt = s.ask("Write a fable about", "Tell a fable with", "Make up a fable about")
    prompt += f" {article(one[0])} and {article(two[0])} near the {s.place[0]}, where {s.trouble[0]}."
    wise = s.say(one, one[0], two[0])
    text = (
        f"{capital(article(one[0]))} and {article(two[0])} met near the {s.place[0]}. {about_animal(s, one)}"
    )
    text += f" The {two[0]} was {two[1]} and never went far from {two[4]}."
    text += f" {solved(s, 'the ' + wise)} The {one[0] if wise == two[0] else two[0]} watched with surprise."
    return prompt, text + s.say(two, f" The lesson is that {s.trouble[2]}.", f" Remember: {s.trouble[2]}.")


def letter(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Write a letter from", "Please write a friendly letter from")
    prompt += f" {s.hero} to {s.friend} about the {s.place[0]} in {s.town} and {article(s.thing[0])}."
    prompt += f" The weather is {s.weather[0]} and {s.hero} is {s.mood[0]}."
    hello = s.say(
        s.friend, "I hope you are well.", "It has been a long time.", "Thank you for your last letter."
    )
    text = f"Dear {s.friend},\n{hello} I am writing from {s.town}. {sky(s)} {look(s, s.place)}"
    text += f" Yesterday I found {article(s.thing[0])}. {about_thing(s, s.thing)}"
    close = s.say(
        s.mood, f"I am {s.mood[0]}, because {s.mood[2]}.", f"I must {s.mood[3]}.", "Please visit me soon."
    )
    return prompt, f"{text} {close}\n{s.say(s.hero, 'Yours', 'With love', 'Your friend')},\n{s.hero}"


def postcard(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Write a postcard from", "Compose a short postcard from")
    prompt += f" {s.town} to {s.friend}, signed by {s.hero}, about {s.weather[0]}, the {s.place[0]} and {s.dish[0]}."
    text = f"Hello {s.friend}! " + s.say(s.town, f"{s.town} is lovely.", f"Greetings from {s.town}.")
    text += f" {sky(s)} We walked to the {s.place[0]} {s.place[1]}; it is {s.place[5]}."
    text += f" For supper there was {s.dish[0]} with {s.dish[4]}. See you on {s.day}! {s.hero}"
    return prompt.replace(", signed", f" before {s.day}, signed"), text


def dialogue(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Write a dialogue between", "Let us hear a talk between", "Write a conversation between")
    prompt += (
        f" {s.hero} and {s.friend} about {article(s.thing[0])} in the {s.place[0]}. {s.hero} is {s.mood[0]}."
    )
    first = s.say(
        s.mood, f"Why are you so {s.mood[0]}?", f"You look {s.mood[0]} today.", "What is the matter?"
    )
    text = (
        f"{s.friend}: {first}\n{s.hero}: {capital(s.mood[2])}. And {s.thing[4]}, I mean the {s.thing[0]}.\n"
    )
    text += f"{s.friend}: You should {s.thing[5]}, and then {s.mood[3]}.\n"
    text += f"{s.hero}: Good idea. Shall we meet in the {s.place[0]}?\n{s.friend}: "
    text += s.say(s.place, f"Yes, I like it there. It is {s.place[5]}.", f"Gladly. I love {s.place[3]}.",
                  f"Only if there is no smell of {s.place[4]}!")  # fmt: skip
    return prompt, text + f"\n{s.hero}: Then I will bring the {s.thing[0]} {s.time}."


def interview(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Write an interview with", "Make a short interview with")
    prompt += f" {s.hero}, {article(s.job[0])} from {s.town}, who has {article(s.thing[0])}."
    text = (
        f"Question: What does {article(s.job[0])} do?\nAnswer: {article(s.job[0]).capitalize()} {s.job[2]}."
    )
    text += f"\nQuestion: Which tool do you need, {s.hero}?\nAnswer: I need {s.job[1]}. I also use my {s.thing[0]} to"
    text += f" {s.thing[2]}.\nQuestion: How does one see real skill?\nAnswer: By {s.job[3]}."
    return prompt, text + f"\nQuestion: What do you tell young people in {s.town}?\nAnswer: {s.job[4]}."


def describe_place(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Describe", "Please describe", "Give me a description of")
    prompt += f" the {s.place[0]} of {s.town} {s.time}, with {s.weather[0]} and {article(s.animal[0])}."
    text = f"{look(s, s.place)} {capital(s.time)} the {s.place[0]} of {s.town} is {s.place[5]}. {sky(s)}"
    return prompt, f"{text} {about_animal(s, s.animal)}"


def museum_label(s: Scene) -> tuple[str, str]:
    year = s.rng.randint(1610, 1939)
    prompt = s.ask("Write a museum label for", "Write the label in the museum for")
    prompt += f" {article(s.thing[0])} made in {s.town} in {year} by {s.hero}, {article(s.job[0])}."
    text = f"{capital(s.thing[0])}, {s.thing[1]}, {s.town}, {year}. {about_thing(s, s.thing)}"
    text += f" {s.hero} was {article(s.job[0])} who {s.job[2]}; one sees the skill in {s.job[3]}."
    return prompt, text + s.say(
        s.thing, f" Gift of {s.town}.", f" To keep it safe, {s.thing[5]}.", " Do not touch."
    )


def diary(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Write a diary entry of", "Write a page from the diary of")
    prompt += f" {s.hero}, {s.day}, {s.weather[0]}, after a visit to the {s.place[0]} with {s.friend}."
    prompt += f" {s.hero} feels {s.mood[0]}."
    text = f"{s.day}. {sky(s)} This morning I went to the {s.place[0]} with {s.friend}. {look(s, s.place)}"
    return prompt, f"{text} {feeling(s, s.friend)} I feel {s.mood[0]} too, and tomorrow I will {s.mood[3]}."


def news(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Write a news report", "Write a short article for the paper")
    prompt += f": on {s.day} in {s.town}, {s.trouble[0]}. {s.hero}, {article(s.job[0])}, helped at the {s.place[0]}."
    text = f"{s.town}, {s.day}. " + s.say(
        s.town, "There was excitement", "People were surprised", "Many came running"
    )
    text += f" at the {s.place[0]} {s.place[1]}, when it became known that {s.trouble[0]}. {s.hero}, {article(s.job[0])}"
    text += f" who {s.job[2]}, {s.trouble[1]}. " + s.say(
        s.job,
        f'"{s.job[4]}," {s.she} told our reporter.',
        f"Asked about it, {s.she} only said that {s.trouble[2]}.",
        f'The mayor of {s.town} thanked {s.hero} and said: "Such help is rare."',
    )
    return prompt, text


def weather_report(s: Scene) -> tuple[str, str]:
    low, high = int(s.weather[4]), int(s.weather[5])
    low, high = low + s.rng.randint(0, 2), high + s.rng.randint(0, 4)
    prompt = s.ask("Give the weather report", "Write the weather forecast")
    prompt += (
        f" for {s.town} on {s.day}: {s.weather[0]}, from {low} to {high} degrees; mention the {s.place[0]}."
    )
    text = f"Weather for {s.town}, {s.day}: {s.weather[1]}. Temperatures rise from {low} degrees in the morning to"
    text += (
        f" {high} degrees, a difference of {high - low}. Near the {s.place[0]} {s.place[1]}, {s.weather[2]}."
    )
    return prompt, text + f" During the night, {s.weather[3]}."


def recipe(s: Scene) -> tuple[str, str]:
    people = s.rng.randint(2, 9)
    prompt = s.ask("Write a recipe for", "How do I cook", "Give me a recipe for")
    prompt += f" {s.dish[0]} for {people} people, the way {s.hero} the {s.job[0]} does it."
    one, two, three, four = s.dish[1].split(", ")
    text = f"{capital(s.dish[0])} for {people}:\nYou need {one}, {two}, {three} and {four}.\n1. First {s.dish[2]}."
    text += f"\n2. Add the {two} and the {three}, and wait a little.\n3. Then {s.dish[3]}.\n4. Serve with {s.dish[4]}."
    return prompt, text + f"\nIt takes {s.dish[5]} minutes. As {s.hero} says: {s.job[4]}."


def shopping_list(s: Scene) -> tuple[str, str]:
    number, number2 = s.rng.randint(3, 19), s.rng.randint(3, 19)
    prompt = s.ask("Write a shopping list", "Make a shopping list")
    prompt += f" for {s.hero}: {number} {s.good}, {number2} {s.good2} and all that is needed for {s.dish[0]}."
    items = s.dish[1].split(", ")
    lines = [f"{number} {s.good}", f"{number2} {s.good2}", *items, s.dish[4]]
    text = f"Shopping list for {s.hero}:\n" + "\n".join(f"- {line}" for line in lines)
    return (
        prompt,
        text + f"\nThat makes {number + number2} pieces, and {len(items) + 1} things for the {s.dish[0]}.",
    )


def packing_list(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Make a packing list", "What should one pack? Write a list")
    prompt += f" for a trip of {s.hero} to the {s.place[0]} near {s.town} with {s.weather[0]};"
    prompt += f" the {s.thing[0]} and the {s.thing2[0]} must come along."
    text = f"Packing list for {s.hero}:\n- the {s.thing[0]}, to {s.thing[2]}\n- the {s.thing2[0]}, to {s.thing2[2]}"
    text += f"\n- something against {s.weather[0]}: {s.weather[2]}\n- bread for the way to {s.town}"
    return prompt, text + f"\nThe {s.place[0]} is {s.place[1]}. Before you go, {s.thing[5]}."


def repair(s: Scene) -> tuple[str, str]:
    prompt = s.ask("How do I repair", "Explain how to mend", "Give instructions to repair")
    prompt += f" {article(s.thing[0])} when {s.thing[4]}? I am {s.mood[0]} and I have {s.job[1]}."
    text = f"Do not worry. Step 1: Put the {s.thing[0]} on a clean table and look at {s.thing[3]}."
    text += f" Step 2: If {s.thing[4]}, use {s.job[1]} with care. Step 3: {capital(s.thing[5])}."
    text += s.say(
        s.job, f" The {s.job[0]} says: {s.job[4]}.", f" If it still fails, ask {article(s.job[0])}."
    )
    return prompt, text + f" And since you are {s.mood[0]}: {s.mood[3]}."


def directions(s: Scene) -> tuple[str, str]:
    steps = s.rng.randint(2, 9) * 100
    prompt = s.ask("How do I get", "Tell me the way", "Give me directions")
    prompt += f" from the {s.place[0]} to the {s.place2[0]} in {s.town}? It is {steps} steps and there is {s.weather[0]}."
    turn = s.say(s.place2, "left", "right")
    text = f"Start at the {s.place[0]} {s.place[1]}. Walk {steps // 2} steps until you hear {s.place[3]} no more, then"
    text += f" turn {turn}. After another {steps // 2} steps you reach the {s.place2[0]} {s.place2[1]}."
    return prompt, f"{text} You will know it by {s.place2[2]}. There is {s.weather[0]}, so {s.weather[2]}."


def addition(s: Scene) -> tuple[str, str]:
    one, two, away = s.rng.randint(11, 60), s.rng.randint(11, 39), s.rng.randint(2, 9)
    prompt = (
        f"{s.hero} has {one} {s.good} and gets {two} more from {s.friend}. Then {s.she} gives away {away}."
    )
    prompt += " " + s.ask("How many are left?", "How many does that make?", "Explain the sum.")
    text = f"{s.hero} starts with {one} {s.good}. {s.friend} brings {two}, so there are {one} + {two} = {one + two}"
    text += f" {s.good}. Then {s.she} gives away {away}: {one + two} - {away} = {one + two - away}."
    return prompt, text + f" So {s.hero} has {one + two - away} {s.good} left."


def price(s: Scene) -> tuple[str, str]:
    count, each = s.rng.randint(2, 9), s.rng.randint(2, 9)
    total, paid = count * each, (count * each // 10 + 1) * 10
    prompt = f"{s.hero} buys {count} {s.good} in {s.town} for {each} coins each and pays with {paid} coins."
    prompt += " " + s.ask("What is the change?", "How many coins come back?", "How much is it?")
    text = f"Each of the {s.good} costs {each} coins, and {s.hero} buys {count} of them. {count} x {each} = {total}, so"
    text += f" the price is {total} coins. {capital(s.she)} pays with {paid} coins: {paid} - {total} = {paid - total}."
    return prompt, text + f" The trader in {s.town} gives back {paid - total} coins."


def sharing(s: Scene) -> tuple[str, str]:
    people, each, rest = s.rng.randint(3, 9), s.rng.randint(2, 9), s.rng.randint(0, 2)
    total = people * each + rest
    prompt = f"In the {s.place[0]}, {s.hero} shares {total} {s.good} among {people} people."
    prompt += " " + s.ask(
        "How many does each one get?", "How many are left over?", "Explain how it comes out."
    )
    left = f"{rest} {'is' if rest == 1 else 'are'} left over" if rest else "nothing is left over"
    text = f"There are {total} {s.good} in the {s.place[0]} and {people} people. {people} x {each} = {people * each}, so"
    return (
        prompt,
        f"{text} each one gets {each} {s.good}. {total} - {people * each} = {rest}, so {left} for {s.hero}.",
    )


def conversion(s: Scene) -> tuple[str, str]:
    big, small, factor = s.rng.choice([("hours", "minutes", 60), ("metres", "centimetres", 100), ("weeks", "days", 7),
                                       ("kilos", "grams", 1000), ("dozens", "pieces", 12)])  # fmt: skip
    count = s.rng.randint(2, 9)
    prompt = s.ask("Convert", "Please convert", "For the work of " + article(s.job[0]) + ", convert")
    prompt += f" {count} {big} to {small} for {s.hero}, who needs it for the {s.thing[0]}."
    text = f"There are {factor} {small} in each of the {big}. {s.hero} has {count} {big}, so we multiply: {count} x"
    text += f" {factor} = {count * factor}. That is {count * factor} {small} for the {s.thing[0]}."
    return prompt, text + s.say(s.thing, f" Now it can {s.thing[2]}.", f" And remember: {s.thing[5]}.")


def timetable(s: Scene) -> tuple[str, str]:
    hour, minute, ride = s.rng.randint(6, 18), s.rng.choice([5, 10, 15, 20]), s.rng.choice([15, 20, 25, 30])
    prompt = s.ask("Make a timetable", "Write the timetable")
    prompt += f": trains leave {s.town} for {s.town2} at {hour}:{minute:02d} and then each hour, {ride} minutes a ride."
    text = f"Timetable {s.town} to {s.town2}:\n"
    rows = [f"leaves {hour + i}:{minute:02d}, arrives {hour + i}:{minute + ride:02d}" for i in range(3)]
    return prompt, text + "\n".join(rows) + f"\nThe ride takes {ride} minutes. Tickets are sold in {s.town}."


def day_plan(s: Scene) -> tuple[str, str]:
    hour = s.rng.randint(6, 9)
    prompt = s.ask("Plan a day", "Make a plan for a day")
    prompt += (
        f" in {s.town} for {s.hero}, starting at {hour}: the {s.place[0]}, the {s.place2[0]} and {s.dish[0]}."
    )
    text = f"{hour}:00 Breakfast in {s.town}.\n"
    text += f"{hour + 1}:30 Visit the {s.place[0]} {s.place[1]} and look at {s.place[2]}.\n"
    text += f"{hour + 4}:00 Lunch: {s.dish[0]} with {s.dish[4]}.\n"
    text += f"{hour + 6}:30 Walk to the {s.place2[0]}, which is {s.place2[5]}, and listen to {s.place2[3]}."
    return prompt, text + f"\n{hour + 10}:00 {s.hero} goes home."


def definition(s: Scene) -> tuple[str, str]:
    prompt = s.ask("What is", "Define:", "Explain to a child what is")
    prompt += f" {article(s.thing[0])}, and what has {article(s.job[0])} to do with it?"
    text = f"{capital(article(s.thing[0]))} is a thing of {s.thing[1]} with {s.thing[3]}. It is used to {s.thing[2]}."
    text += (
        f" Sometimes {s.thing[4]}; then {s.thing[5]}. {capital(article(s.job[0]))} is somebody who {s.job[2]}"
    )
    return prompt, text + s.say(
        s.job, f" and may own {article(s.thing[0])}.", f" and needs {s.job[1]} for it.", "."
    )


def comparison(s: Scene) -> tuple[str, str]:
    one, two = s.thing, s.thing2
    prompt = s.ask("Compare", "What is the difference between", "Please compare")
    prompt += f" {article(one[0])} and {article(two[0])} for {article(s.job[0])} in the {s.place[0]}."
    text = f"{about_thing(s, one)} The {two[0]}, however, is made of {two[1]} and can {two[2]}."
    text += (
        f" With the first, {one[4]}; with the second, {two[4]}. In the {s.place[0]}, which is {s.place[5]},"
    )
    return prompt, text + f" {article(s.job[0])} should take the {s.say(s.job, one[0], two[0])}."


def pros_and_cons(s: Scene) -> tuple[str, str]:
    prompt = s.ask("List pros and cons", "What speaks for and against it? List pros and cons")
    prompt += f" of living in the {s.place[0]} as {article(s.job[0])} with {article(s.animal[0])}."
    text = f"For it:\n- It is {s.place[5]}.\n- One can see {s.place[2]}.\n- The {s.animal[0]} likes {s.animal[2]}."
    text += f"\nAgainst it:\n- There is always {s.place[3]}.\n- It smells of {s.place[4]}.\n- The {s.animal[0]} is"
    return (
        prompt,
        f"{text} {s.animal[1]} and {s.animal[3]}.\nA {s.job[0]} {s.job[2]}, so it may be worth a try.",
    )


def json_record(s: Scene) -> tuple[str, str]:
    age, count = s.rng.randint(18, 79), s.rng.randint(2, 9)
    prompt = s.ask("Write a JSON record", "Give me JSON")
    prompt += (
        f" for {s.hero}, {age}, {s.job[0]} in {s.town}, with {count} {s.good} and a {s.colour} {s.thing[0]}."
    )
    record = {"name": s.hero, "age": age, "job": s.job[0], "town": s.town, "skill": s.job[3],
              "items": [{"kind": s.good, "count": count},
                        {"kind": s.thing[0], "colour": s.colour, "material": s.thing[1], "use": s.thing[2]}]}  # fmt: skip
    return prompt, json.dumps(record)


def csv_table(s: Scene) -> tuple[str, str]:
    counts = [s.rng.randint(2, 40) for _ in range(2)]
    prompt = s.ask("Make a CSV table", "Write a table as CSV")
    prompt += (
        f" of {s.thing[0]}, {s.thing2[0]} in {s.colour} with {counts[0]} and {counts[1]} pieces in {s.town}."
    )
    rows = ["name,material,use,colour,pieces,town"]
    for thing, count in zip((s.thing, s.thing2), counts, strict=True):
        rows.append(f"{thing[0]},{thing[1]},{thing[2]},{s.colour},{count},{s.town}")
    return prompt, "\n".join(rows) + f"\ntotal,,,,{sum(counts)},{s.town}"


def python_code(s: Scene) -> tuple[str, str]:
    limit = s.rng.randint(3, 90)
    prompt = s.ask("Write a Python function", "Write Python code: a function")
    prompt += f" that counts the {s.good} of {s.hero} in {s.colour} above {limit}."
    text = f'def count_{s.good}(items):\n    total = 0\n    for item in items:\n        if item.colour == "{s.colour}"'
    text += f' and item.size > {limit}:\n            total += 1\n    return total\n\nprint("{s.hero} has",'
    return prompt, f'{text} count_{s.good}({s.hero.lower()}_{s.good}), "{s.colour} {s.good}")'


def advice(s: Scene) -> tuple[str, str]:
    prompt = s.ask("I feel", "Today I am", "Since yesterday I am")
    prompt += (
        f" {s.mood[0]}, because {s.mood[2]}. My friend {s.friend} is {article(s.job[0])}. What should I do?"
    )
    text = s.say(s.mood, "I understand you well.", "That happens to everybody.", "Thank you for telling me.")
    text += f" When one is {s.mood[0]}, it helps to {s.mood[3]}. Talk to {s.friend}, who {s.job[2]} and knows that"
    text += f" {s.job[4][0].lower()}{s.job[4][1:]}. Then go out, perhaps to the {PLACES[len(s.mood[2]) % len(PLACES)][0]}."
    return prompt, text + s.say(
        s.job, " It will pass.", f" {s.friend} will be glad to help.", " Give it a day."
    )


def apology(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Write an apology", "Help me to apologise: write a note")
    prompt += f" from {s.hero} to {s.friend}: the {s.thing[0]} is broken, {s.thing[4]}. {s.hero} offers {s.dish[0]}."
    text = f"Dear {s.friend},\nI am very sorry about your {s.thing[0]}. " + s.say(
        s.thing,
        f"Now {s.thing[4]}, and it is my fault.",
        f"I forgot to {s.thing[5]}, and now {s.thing[4]}.",
        f"I only wanted to {s.thing[2]}, but then it broke.",
    )
    text += f" I will ask {article(s.job[0])} to mend it. Come on {s.day}; there will be {s.dish[0]} with {s.dish[4]}."
    return prompt + f" Say {s.day} and {s.job[0]}.", f"{text}\n{s.hero}"


def poem(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Write a poem", "Write some lines of verse")
    prompt += f" about {article(s.animal[0])}, the {s.place[0]} and {s.weather[0]} {s.time}."
    text = f"{capital(s.time)}, {s.place[1]},\nthe {s.animal[0]} wakes in {s.animal[4]}.\n{capital(s.place[3])},\n"
    text += f"{s.weather[1]}.\nOh {s.animal[1]} {s.animal[0]}, it {s.animal[3]},\n"
    return prompt, text + f"with {s.animal[5]} it calls for {s.animal[2]}.\nThe {s.place[0]} is {s.place[5]}."


def invitation(s: Scene) -> tuple[str, str]:
    hour = s.rng.randint(3, 9)
    prompt = s.ask("Write an invitation", "Please write an invitation card")
    prompt += (
        f" from {s.hero} to {s.friend}: {s.day} at {hour}, in the {s.place[0]} of {s.town}, with {s.dish[0]}."
    )
    text = f"Dear {s.friend}, you are invited to the {s.place[0]} of {s.town} on {s.day} at {hour} o'clock."
    text += s.say(s.place, f" You will see {s.place[2]}.", f" It is {s.place[5]} there, with {s.place[3]}.")
    text += (
        f" We will eat {s.dish[0]} with {s.dish[4]}, which takes {s.dish[5]} minutes, so please be on time."
    )
    return prompt, text + s.say(s.hero, f" {s.hero} looks forward to it.", f" Yours, {s.hero}")


def review(s: Scene) -> tuple[str, str]:
    stars = s.rng.randint(1, 5)
    prompt = s.ask("Write a review", "Write a customer review")
    prompt += f" with {stars} stars for a {s.colour} {s.thing[0]} from {s.town}, by {article(s.job[0])}."
    mood = ["I am very disappointed", "It could be better", "It is neither good nor bad", "I am quite pleased",
            "I could not be happier"][stars - 1]  # fmt: skip
    text = f"{stars} of 5 stars. {mood} with this {s.colour} {s.thing[0]} from {s.town}. {about_thing(s, s.thing)}"
    text += f" As {article(s.job[0])} I know {s.job[3]} when I see it."
    return prompt, text + (f" Sadly {s.thing[4]}." if stars < 4 else f" Just {s.thing[5]} and it will last.")


def riddle(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Make a riddle about", "Write a riddle, the answer is", "Give me a riddle for")
    prompt += f" {article(s.thing[0])} or {article(s.animal[0])}, asked by {s.hero} in the {s.place[0]}."
    text = f"In the {s.place[0]}, {s.hero} asked: I am made of {s.thing[1]} and I have {s.thing[3]}."
    text += f" Without me nobody can {s.thing[2]}. If you forget me, {s.thing[4]}. What am I? The answer is"
    text += (
        f" the {s.thing[0]}. Then {s.she} asked: I am {s.animal[1]}, I live in {s.animal[4]} and my voice is"
    )
    return prompt, f"{text} {s.animal[5]}. The answer is the {s.animal[0]}."


def animal_facts(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Tell me facts about", "What do you know about", "Tell a pupil about")
    prompt += f" the {s.animal[0]} and the {s.animal2[0]} near the {s.place[0]} in {s.weather[0]}."
    text = f"{about_animal(s, s.animal)} {about_animal(s, s.animal2)} Near the {s.place[0]} {s.place[1]} one may meet"
    text += f" both. When there is {s.weather[0]}, the {s.animal[0]} hides in {s.animal[4]}, and the {s.animal2[0]}"
    return prompt, f"{text} looks for {s.animal2[2]}. Listen for {s.animal[5]} and {s.animal2[5]}."


def why(s: Scene) -> tuple[str, str]:
    prompt = s.ask("Why was", "Explain why", "Can you tell why")
    prompt += f" {s.hero} the {s.job[0]} {s.mood[0]} {s.time} in the {s.place[0]}, when {s.trouble[0]}?"
    text = f"{feeling(s, s.hero)} {capital(s.trouble[0])}, and {article(s.job[0])}, who {s.job[2]}, cannot ignore that."
    text += f" {look(s, s.place)} So {s.hero} {s.trouble[1]} {s.time}."
    return prompt, text + s.say(s.mood, f" It shows that {s.trouble[2]}.", f" As they say, {s.trouble[2]}.")


def toast(s: Scene) -> tuple[str, str]:
    years = s.rng.randint(5, 45)
    prompt = s.ask("Write a speech", "Write a toast", "Write a few words of thanks")
    prompt += f" for {s.hero}, {years} years {s.job[0]} in {s.town}, who once helped when {s.trouble[0]}."
    text = f"Dear friends, for {years} years {s.hero} has been {article(s.job[0])} in {s.town}. {capital(s.she)} {s.job[2]}"
    text += f" with {s.job[1]}, and we all admire {s.job[3]}. {solved(s, s.hero)}"
    text += s.say(
        s.job, f" {capital(s.her)} rule is: {s.job[4]}.", f" {capital(s.she)} taught us that {s.trouble[2]}."
    )
    return prompt, text + f" Let us raise our glasses to {s.hero} and to the next {years} years!"


Family = Callable[[Scene], tuple[str, str]]
FAMILIES: dict[str, Family] = {
    family.__name__: family
    for family in (story, fable, letter, dialogue, describe_place, museum_label, news, weather_report, recipe,
                   shopping_list, repair, directions, addition, sharing, conversion, timetable, day_plan, definition,
                   pros_and_cons, json_record, csv_table, python_code, advice, apology, poem, review, animal_facts,
                   why, toast, diary, invitation, comparison, interview, packing_list, price, riddle, postcard)
}  # fmt: skip
# The target knows these too, but the draft head never sees a prompt or an answer of them in training. They are built
# from sentences (places, weather, moods, objects) that other families use as well, as real held-out prompts share their
# language with training: a head of half a million weights cannot draft sentences that it never met.
HELDOUT_NAMES = ("diary", "letter", "comparison", "toast", "museum_label", "postcard")
HELDOUT_FAMILIES = {name: FAMILIES[name] for name in HELDOUT_NAMES}
TRAIN_FAMILIES = {name: family for name, family in FAMILIES.items() if name not in HELDOUT_NAMES}

# system prompt | how every answer begins | how it ends
PERSONAS = _table("""
You are a polite butler. Start each answer with "Very well." and end with "At your service."|Very well.|At your service.
You are an old pirate. Start each answer with "Ahoy!" and end with "Arr."|Ahoy!|Arr.
You are a strict teacher. Start each answer with "Listen." and end with "Now repeat it."|Listen.|Now repeat it.
You are a kind grandmother. Start each answer with "My dear," and end with "Sleep well."|My dear,|Sleep well.
You are a busy robot. Start each answer with "Task received." and end with "Task done."|Task received.|Task done.
""")


@dataclass
class Draft:
    """A conversation before the target has answered: the grammar's answers serve the target's training only."""

    families: list[str]
    system: str | None
    prompts: list[str]
    answers: list[str]


def draft_conversation(
    rng: random.Random, families: dict[str, Family], multi_turn_share: float, system_share: float
) -> Draft:
    """One to three turns over one scene, all of different families of the given split."""
    scene = Scene(rng)
    num_turns = rng.choice([2, 2, 3]) if rng.random() < multi_turn_share else 1
    names = rng.sample(sorted(families), num_turns)
    turns = [families[name](scene) for name in names]
    persona = rng.choice(PERSONAS) if rng.random() < system_share else None
    answers = [f"{persona[1]} {answer} {persona[2]}" if persona else answer for _, answer in turns]
    return Draft(names, persona[0] if persona else None, [prompt for prompt, _ in turns], answers)
