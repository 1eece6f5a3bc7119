"""Word lists for NIAH keys: common adjectives and nouns, lower case, no hyphens."""

_ADJECTIVE_TEXT = """
amber ancient bitter bold brave brief bright broad calm careful cheerful chilly clever cloudy
coastal cold crimson curious dapper deep distant dusty eager early earnest elegant faint fancy
fearless fierce fluffy foggy fragile frozen gentle giant gleaming golden graceful grand hollow
honest humble icy idle jolly keen kind lively lonely loud lucky mellow mighty misty modest
narrow nimble noble odd patient placid plain polite proud quaint quick quiet rapid rare
restless rough rusty scarlet secret shallow sharp shiny silent silver simple sleepy slender
smooth solemn steady stormy strange sturdy subtle sunny swift tender thirsty tidy tiny tranquil
useful vast velvet vivid wandering warm weary wild windy wise wooden yellow young zealous
"""
_NOUN_TEXT = """
acorn anchor apple arrow badger balloon banjo barrel basket beacon beetle blanket bottle bridge
bucket butter button cabin camel candle canoe canyon carpet castle cellar cherry chimney circle
clover comet copper coral cottage cradle cricket crystal curtain daisy desert diamond dolphin
donkey drum eagle engine falcon feather fiddle flute forest fountain fox garden garlic giraffe
glacier goblet granite guitar hammer harbor hazel heron hill honey island ivy jacket jungle
kettle kitten ladder lantern lemon library lizard lobster magnet maple marble meadow mirror
monkey mountain mushroom needle nest oasis ocean olive orchard otter owl paddle parrot pebble
pencil pepper piano pillow pirate planet pocket pond potato pumpkin puzzle rabbit raven ribbon
river rocket saddle sailor salmon sandal shadow shovel spider spoon squirrel statue table
teapot temple thunder tiger timber tower trumpet tunnel turtle umbrella valley velcro village
violin volcano wagon walnut whale willow window wizard wolf
"""

ADJECTIVES = tuple(_ADJECTIVE_TEXT.split())
NOUNS = tuple(_NOUN_TEXT.split())
