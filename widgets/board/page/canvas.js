// What the pictures on canvases use: their size, the colours of the theme, short texts.

export const DARK = "#1a1a1a"; // on orange, in any theme

/** The colours of the theme at an element, and the font of small texts. */
export function colours(element) {
  const style = getComputedStyle(element);
  const get = (name) => style.getPropertyValue(name).trim();
  return {
    text: get("--rs-fg"),
    quiet: get("--rs-quiet"),
    line: get("--rs-line"),
    accent: get("--rs-accent"),
    late: get("--rs-warn"),
    bad: get("--rs-error"),
    badText: get("--rs-error-text"),
    ground: get("--rs-ground"),
    font: `10px ${style.fontFamily}`,
  };
}

/** Set the size of a canvas to its size on the page; return its context, in px. */
export function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

/** The beginning of a text that fits; nothing if it is too short to read. */
export function clip(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let end = text.length;
  while (end > 0 && pen.measureText(`${text.slice(0, end)}…`).width > room) end--;
  return end >= 4 ? `${text.slice(0, end)}…` : "";
}
