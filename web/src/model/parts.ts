// Parts of steps: their order and their colours.

/** In the order of a step; a name that joins several (`forward + backward`) goes by its first. */
const ORDER = ["data wait", "transfer", "forward", "backward", "bubble", "optimizer", "other"];

function firstOf(name: string): string {
  return (name.split(" + ")[0] ?? "").replaceAll("_", " ");
}

/** The colour of a part, as a custom property of the style. */
export function partColor(name: string): string {
  const first = firstOf(name);
  return ORDER.includes(first) ? `var(--part-${first.replaceAll(" ", "-")})` : "var(--part-other)";
}

export function inOrder(names: Iterable<string>): string[] {
  const place = (name: string): number => {
    const found = ORDER.indexOf(firstOf(name));
    return found < 0 ? ORDER.length : found;
  };
  return [...names].sort((one, other) => place(one) - place(other));
}
