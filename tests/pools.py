"""Pools of ranks for tests of recipes: one that hangs costs one deadline, not one for each of its runs."""

from pathlib import Path

from harness.pool import Pool, PoolError

TIMEOUT = 60  # seconds for a call on a recipe: of 800, on two cores with 20 processes that wanted them, none took 20
LONGER = {"gpt": 300, "spawn": 180}  # whose graphs take long to compile; which starts ranks of its own
OTHERWISE = 300  # for a call on no recipe, such as the measurements of the SBP atlas


class RecipePool(Pool):
    """A pool whose calls on a recipe have the recipe's deadline. When one hangs, all others of that recipe fail."""

    hung = {}  # the text of a recipe -> the call that hung, of all pools
    calling = {}  # pool -> the text of the recipe that it calls now
    repeated = []  # the calls of all pools that were made once more because OneFlow died

    def __init__(self, world_size, timeout=TIMEOUT, repeat=True, **options):
        super().__init__(world_size, timeout, repeat, **options)
        self.recipe_timeout, self.repeated = timeout, RecipePool.repeated

    def call(self, function, **arguments):
        path = Path(arguments.get("path", ""))
        if path.suffix != ".py" or not path.is_file():
            self.timeout = max(self.recipe_timeout, OTHERWISE)
            return super().call(function, **arguments)
        self.timeout = max(self.recipe_timeout, LONGER.get(path.stem, 0))
        recipe = path.read_bytes()  # a copy of it is the same; one that was changed is another
        self._check(path, recipe)
        self.calling[self] = recipe
        try:
            return super().call(function, **arguments)
        except PoolError as error:
            self._check(path, recipe)
            if error.hung:
                self.hung[recipe] = f"{Path(function).name} on {self.world_size} ranks"
                self._end_other_calls(recipe)
            raise
        finally:
            del self.calling[self]

    def _check(self, path, recipe):
        """Raises PoolError if the recipe has hung."""
        if recipe in self.hung:
            raise PoolError(
                0, f"{path.name} hung in {self.hung[recipe]}, so it is not called again", hung=True
            ) from None

    def _end_other_calls(self, recipe):
        """End the calls of this recipe that other threads wait for."""
        for pool, called in list(self.calling.items()):
            if called == recipe and pool is not self and pool.ranks:
                pool.ranks.end(grace=0)
