"""Pools of ranks for tests of recipes: one that hangs costs one deadline, not one for each of its runs."""

from pathlib import Path

from harness.pool import Pool, PoolError

TIMEOUT = 60  # seconds for a call on a recipe: of 800, on two cores with 20 processes that wanted them, none took 20
LONGER = {"gpt": 300, "spawn": 180}  # whose graphs take long to compile; which starts ranks of its own
OTHERWISE = 300  # for a call on no recipe, such as the measurements of the SBP atlas


class RecipePool(Pool):
    """A pool whose calls on a recipe have the recipe's deadline. After one has hung, the others fail at once."""

    hung = {}  # the text of a recipe -> the call that hung, of all pools

    def __init__(self, world_size, timeout=TIMEOUT, repeat=True, **options):
        super().__init__(world_size, timeout, repeat, **options)
        self.recipe_timeout = timeout

    def call(self, function, **arguments):
        path = Path(arguments.get("path", ""))
        if path.suffix != ".py" or not path.is_file():
            self.timeout = max(self.recipe_timeout, OTHERWISE)
            return super().call(function, **arguments)
        recipe = path.read_bytes()  # a copy of it is the same; one that was changed is another
        if recipe in self.hung:
            raise PoolError(0, f"{path.name} was not called: it hung in {self.hung[recipe]}", hung=True)
        self.timeout = max(self.recipe_timeout, LONGER.get(path.stem, 0))
        try:
            return super().call(function, **arguments)
        except PoolError as error:
            if error.hung:
                self.hung[recipe] = f"{Path(function).name} on {self.world_size} ranks"
            raise
