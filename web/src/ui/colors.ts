// The colours of share of peak: seven steps of one scale that reads the same with any colour vision.

export const LIMITS = [0.05, 0.1, 0.2, 0.3, 0.45, 0.6] as const;

/** From little of the peak to most of it; by lightness alone they stay in this order. */
const FILLS = ["#fde9a9", "#c9e4b0", "#8fd0b5", "#52b3bf", "#2f8fbd", "#2b65a5", "#1d3b7c"] as const;
const INKS = ["#1a1d21", "#1a1d21", "#1a1d21", "#10151a", "#ffffff", "#ffffff", "#ffffff"] as const;

export interface Paint {
  fill: string;
  ink: string;
}

/** The paint of a share of the peak; null is what has no FLOPs, or was not measured. */
export function paintOf(share: number | null): Paint {
  if (share === null) return { fill: "var(--no-flops)", ink: "var(--ink)" };
  const step = LIMITS.filter((limit) => share >= limit).length;
  return { fill: FILLS[step] as string, ink: INKS[step] as string };
}

export const STEPS: readonly { fill: string; words: string }[] = FILLS.map((fill, step) => {
  const from = LIMITS[step - 1];
  const to = LIMITS[step];
  const words =
    from === undefined
      ? `under ${(to as number) * 100}%`
      : `${Math.round(from * 100)}${to === undefined ? "% and more" : `–${Math.round(to * 100)}`}`;
  return { fill, words };
});
