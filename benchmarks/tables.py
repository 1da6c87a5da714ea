"""Write tables into a page."""

import re


def table(header, rows):
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def fill(page, parts):
    """The text of a page with each of {name: text} in its place, which is between <!-- name --> and <!-- end -->."""
    for name, text in parts.items():
        text = f"\n{text.strip()}\n" if "\n" in text else text
        place = re.compile(f"(<!-- {name} -->).*?(<!-- end -->)", flags=re.DOTALL)
        assert len(place.findall(page)) == 1, name
        page = place.sub(lambda match, text=text: match[1] + text + match[2], page)
    return page
