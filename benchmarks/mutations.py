"""The ways in which a recipe is broken: for each place in its text, the texts that replace it."""

import ast
from dataclasses import dataclass

WHOLE = "(lambda t: t.to_global(sbp=[flow.sbp.broadcast] * len(t.sbp)))"
WORLD = "flow.env.get_world_size()"
SBPS = ("flow.sbp.broadcast", "flow.sbp.split(0)", "flow.sbp.split(1)", "flow.sbp.partial_sum")
SHORT = ("B", "S(0)", "S(1)")  # where a recipe has B, S = flow.sbp.broadcast, flow.sbp.split
OPTIONS = ("lr", "momentum", "weight_decay")  # of an optimizer
STATEMENTS = (  # what a recipe must not leave out
    *("zero_grad", "backward", "step", "add_optimizer", "retain_grad", "set_gradient_accumulation_steps"),
    *("set_epoch", "barrier", "flush", "fsync", "rmtree", "remove", "_exit", "close", "kill", "terminate"),
    *("manual_seed", "all_reduce", "broadcast", "load_state_dict"),
)
BY_NUMPY = "the product, in eager mode, computed by numpy"
COPIED = "copied file by file"


@dataclass
class Mutant:
    """A recipe that is changed in a single place."""

    line: int
    change: str  # "old -> new"
    source: str
    in_main: bool  # whether the place is in main, which compares and prints, and not in the lesson


class Source:
    """The text of a recipe, its syntax tree, and the text of each node."""

    def __init__(self, source):
        self.raw, self.tree = source.encode(), ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line.encode()))
        self.nodes = [node for node in ast.walk(self.tree) if hasattr(node, "lineno")]
        self.functions = {node.name for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        self.main = [node for node in self.tree.body if getattr(node, "name", "") == "main"]  # a module has none
        finals = [statement for node in self.nodes for statement in getattr(node, "finalbody", ())]
        self.endings = {part for statement in finals for part in ast.walk(statement)}  # they clean up

    def span(self, node):
        first = self.starts[node.lineno - 1] + node.col_offset
        return first, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node):
        first, last = self.span(node)
        return self.raw[first:last].decode()

    def with_text(self, node, new):
        first, last = self.span(node)
        return (self.raw[:first] + new.encode() + self.raw[last:]).decode()

    def layer_kinds(self):
        """{class of the recipe: its base class} where the recipe gives layers another class."""
        changes_class = any(is_new_class(node) for node in self.nodes)
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef) and node.bases]
        kinds = {node.name: self.text(node.bases[0]) for node in classes if changes_class}
        return {name: base for name, base in kinds.items() if base.split(".")[-1] not in ("Module", "Graph")}


def mutants(source):
    """Yields a Mutant for every way in which the recipe can be broken, in its lesson and in its main."""
    recipe = Source(source)
    kinds = recipe.layer_kinds()
    in_main = {id(node) for main in recipe.main for node in ast.walk(main)}
    for node in recipe.nodes:
        if any(node.lineno > main.end_lineno for main in recipe.main):
            continue
        for new in replacements(node, recipe, kinds, id(node) in in_main):
            old = recipe.text(node)
            if new != old:
                change = f"{' '.join(old.split())} -> {shown(new)}"
                yield Mutant(node.lineno, change, recipe.with_text(node, new), id(node) in in_main)


def lesson(source):
    """What of a recipe is not its main."""
    return source[: source.index("\ndef main(")]


def shown(new):
    """The changed text as the list of mutants has it."""
    long = {"(lambda product": BY_NUMPY, "__import__": COPIED}
    return next((words for beginning, words in long.items() if new.startswith(beginning)), " ".join(new.split()))


def is_new_class(node):
    """Whether a statement gives an object another class."""
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") == "__class__"


def replacements(node, recipe, kinds, in_main):
    """The texts that replace a node of the syntax tree."""
    old = recipe.text(node)
    stored = isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)
    if isinstance(node, ast.Expr) and node in recipe.endings:
        return ["pass"]
    if is_refusal(node, recipe):
        return ["pass"]
    if in_main and isinstance(node, ast.Expr) and old.startswith("np.testing.assert_"):
        return comparisons_changed(node.value, recipe)
    if in_main and isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
        return [recipe.text(node.left), recipe.text(node.right)]
    if old in SBPS or (isinstance(node, ast.Call) and recipe.text(node.func) == "flow.sbp.split"):
        return [sbp for sbp in SBPS if sbp != old]
    if old in SHORT and not stored:
        return [sbp for sbp in SHORT if sbp != old]
    if old in ("graph", "args.graph") and not stored:
        return ["True", "False"]
    if isinstance(node, ast.Compare) and "rank" in old.lower():
        return ["True", "False"]
    if isinstance(node, ast.Subscript) and old in TWINS:
        return [TWINS[old]]
    if is_new_class(node):
        return ["pass"]
    if isinstance(node, ast.Name) and node.id in kinds:
        return [kind for kind in (*kinds, kinds[node.id]) if kind != node.id]
    if isinstance(node, ast.Dict):
        return options_changed(node, recipe)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = recipe.text(node.value.func).split(".")[-1]
        return ["pass"] if called in STATEMENTS else []
    if not isinstance(node, ast.Call):
        return []
    return [*calls_changed(node, recipe), *without_an_argument(node, recipe, in_main)]


ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv)


def is_refusal(node, recipe):
    """Whether a statement refuses an input: `raise`, or `parser.error` outside of an `except`."""
    if isinstance(node, ast.Raise):
        return node.exc is not None
    called = getattr(node, "value", None)
    return isinstance(node, ast.Expr) and isinstance(called, ast.Call) and recipe.text(called.func) == "parser.error"


def comparisons_changed(node, recipe):
    """In place of a comparison none, one of a value with itself, and one with a tolerance 1,000 times as wide."""
    function, (one, other, *_) = recipe.text(node.func), [recipe.text(argument) for argument in node.args]
    rest = [(keyword.arg, recipe.text(keyword.value)) for keyword in node.keywords]
    changed = ["pass", *(f"{function}({listed([same, same], rest)})" for same in (one, other))]
    for name, value in rest:
        if name in ("rtol", "atol"):
            wider = [(key, f"1000 * {value}" if key == name else text) for key, text in rest]
            changed.append(f"{function}({listed([one, other], wider)})")
    return changed


def without_an_argument(node, recipe, in_main):
    """In main a call of the recipe's own functions without one of its options; elsewhere any without one of its own.

    An option that is handed on has the name of its variable: seed=seed. In main an option has another default, too.
    """
    function = recipe.text(node.func)
    arguments = [recipe.text(argument) for argument in node.args]
    keywords = [(keyword.arg, recipe.text(keyword.value)) for keyword in node.keywords]
    if function == "parser.add_argument":
        return other_defaults(function, arguments, keywords, node.keywords)
    own = in_main and function in recipe.functions
    changed = [f"{function}({listed(arguments[:-1], keywords)})"] if own and len(arguments) > 1 else []
    for keyword in keywords:
        if own or keyword[0] == keyword[1]:
            others = [other for other in keywords if other != keyword]
            changed.append(f"{function}({listed(arguments, others)})")
    return changed


def other_defaults(function, arguments, keywords, nodes):
    """An option whose default is another number, or another one of its choices."""
    values = {node.arg: node.value for node in nodes}
    default, choices = values.get("default"), getattr(values.get("choices"), "elts", ())
    if not isinstance(default, ast.Constant) or default.value is None:
        return []
    others = [choice.value for choice in choices if choice.value != default.value]
    if not others and type(default.value) is int:
        others = [default.value + 1]
    with_other = [(name, repr(others[0]) if name == "default" else text) for name, text in keywords] if others else []
    return [f"{function}({listed(arguments, with_other)})"] if others else []


TWINS = {f"{name}[{i}]": f"{name}[{1 - i}]" for name in ("ranks", "stages") for i in (0, 1)}


def options_changed(node, recipe):
    """A dict with an optimizer's options, with each option larger in turn."""
    old = recipe.text(node)
    named = {key.value: value for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant)}
    numbers = [recipe.text(named[key]) for key in OPTIONS if isinstance(named.get(key), ast.Constant)]
    return [old.replace(number, f"{number} + 0.5") for number in numbers]


# The name of a function, or its end with a dot -> the texts for its call: {0} is its first argument, {f} the function,
# {all} what the call has in parentheses, {rest} its keywords behind a comma, {t} a transpose if it has keywords.
TEXTS = {
    "flow._C.identity": ["{0}"],
    "os.replace": [  # not in one go, as a crash in between would show
        "__import__('subprocess').run(['sh', '-c', 'cp -r \"$0\" \"$1\" && rm -r \"$0\"', {0}, {1}], check=True)"
    ],
    "flow.placement": [
        "flow.placement({0}, ({1})[:1])",
        "flow.placement({0}, ({1})[-1:])",
        f"flow.placement({{0}}, list(range({WORLD})))",
        f"flow.placement({{0}}, ((np.array({{1}}) + 1) % {WORLD}).tolist())",
        f"flow.placement({{0}}, ({WORLD} - 1 - np.array({{1}})).tolist())",
    ],
    # not all in another order: OneFlow sorts the ranks of a placement
    "flow.placement.all": ["flow.placement({0}, [0])", f"flow.placement({{0}}, [{WORLD} - 1])"],
    ".set_stage": [
        "None",
        "{f}({0} + 1, {1})",
        '{f}({0}, flow.placement("cpu", [0]))',
        f'{{f}}({{0}}, flow.placement("cpu", [{WORLD} - 1]))',
        "{f}({0})",
    ],
    "flow.relu": ["(({f}({all})) * 1.001)", "{0}"],
    "flow.nn.functional.mse_loss": ["(({f}({all})) * 1.001)", "(({f}({all})) + 0.001)"],
    "flow.comm.send": ["flow.comm.send({0} * 1.00001, {1})", "flow.comm.send(-{0}, {1})"],
    "flow.matmul": [
        f"flow.matmul({WHOLE}({{0}}), {{1}}{{rest}})",
        f"flow.matmul({{0}}, {WHOLE}({{1}}){{rest}})",
        f"{WHOLE}(flow.matmul({{all}}))",
        "flow.matmul({0}, -{1}{rest})",
        "flow.matmul({0} * 1.00001, {1}{rest})",
        "flow.matmul({0}, {1}.transpose(0, 1){rest})",
        "((flow.matmul({all}) + flow.matmul({all})) * 0.5)",
        "(lambda product: product if product.is_lazy else flow.tensor({0}.detach().numpy() @ {1}.detach().numpy(){t}, "
        "**({{'placement': product.placement, 'sbp': product.sbp}} if product.is_global else {{}})))"
        "(flow.matmul({all}))",
    ],
}
TEXTS_WITH_KEYWORDS = {  # the same, if the call has keywords
    ".zero_grad": ["{f}()"],
    "flow.tensor": ["{f}(-{0}{rest})", "{f}({0}[::-1].copy(){rest})", "{f}({0}[:, ::-1].copy(){rest})"],
}


def calls_changed(node, recipe):
    """The texts that replace a call."""
    function = recipe.text(node.func)
    arguments = [recipe.text(argument) for argument in node.args]
    keywords = [(keyword.arg, recipe.text(keyword.value)) for keyword in node.keywords]
    if function.startswith("flow.optim."):
        return optimizer(recipe.text(node), node.keywords, recipe)
    for ending, texts in {**TEXTS, **(TEXTS_WITH_KEYWORDS if keywords else {}), **CALLS}.items():
        if function == ending or (ending.startswith(".") and function.endswith(ending)):
            if callable(texts):
                return texts(function, arguments, keywords)
            named = {"f": function, "all": listed(arguments, keywords), "rest": listed([""], keywords)}
            named.update({"t": ".T" if keywords else ""})
            return [text.format(*arguments, **named) for text in texts]
    return []


def listed(arguments, keywords):
    """The arguments of a call as text."""
    return ", ".join([*arguments, *(f"{name}={value}" if name else f"**{value}" for name, value in keywords)])


def to_global(function, arguments, keywords):
    """Without the move, and without each of its keywords."""
    changed = [function[: -len(".to_global")]] if arguments or keywords else []
    for keyword in keywords:
        others = [other for other in keywords if other is not keyword]
        if others:
            changed.append(f"{function}({listed(arguments, others)})")
    return changed


def optimizer(old, keywords, recipe):
    constants = [keyword for keyword in keywords if isinstance(keyword.value, ast.Constant)]
    numbers = [f"{keyword.arg}={recipe.text(keyword.value)}" for keyword in constants]
    return [old.replace(number, f"{number} + 0.5") for number in numbers]


def linear(function, arguments, keywords):
    """A layer with other sizes, with or without its bias, and with another forward."""
    without_bias = [keyword for keyword in keywords if keyword[0] != "bias"]
    bias = without_bias if without_bias != keywords else [*keywords, ("bias", "False")]
    forward = f"{function}.forward(self, x)"
    wrong = [
        f"{function}.forward(self, {WHOLE}(x))",
        f"{WHOLE}({forward})",
        f"-{forward}",
        f"{function}.forward(self, x * 1.00001)",
        f"({forward} + {forward}) * 0.5",
    ]
    listed_arguments = listed(arguments, keywords)
    return [
        f"{function}({listed([*arguments[1::-1], *arguments[2:]], keywords)})",
        f"{function}({listed(arguments, bias)})",
        *[
            f'type("Linear", ({function},), {{"forward": lambda self, x: {body}}})({listed_arguments})'
            for body in wrong
        ],
    ]


CALLS = {"nn.Linear": linear, "flow.nn.Linear": linear, ".to_global": to_global}  # functions that return the texts
