// One colour per class, the same everywhere: neighbours in the list differ in hue, all are legible on light and dark.
const rank = new Map();
export const dark = matchMedia("(prefers-color-scheme: dark)");

export function setClasses(names) {
  names.forEach((name, place) => rank.set(name, place));
}

export function colourOf(name) {
  const place = rank.get(name);
  if (place === undefined) return dark.matches ? "#8b9396" : "#7a8184";
  const hue = (place * 137.508) % 360; // the golden angle
  const step = place % 3;
  return dark.matches ? `hsl(${hue} ${75 - 8 * step}% ${68 - 7 * step}%)` : `hsl(${hue} ${72 - 8 * step}% ${40 + 6 * step}%)`;
}
