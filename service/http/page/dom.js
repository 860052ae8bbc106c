// Elements by name. Text is only ever set as text, so what a label holds is never read as markup.

export const by = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function options(select, entries, chosen) {
  select.replaceChildren(
    ...entries.map(([value, text]) => make("option", { value, textContent: text })),
  );
  if (chosen !== undefined) select.value = chosen;
  select.disabled = entries.length === 0;
}

// Where panels stand below each other, what was asked for may be out of sight.
export function reveal(panel) {
  const { top } = panel.getBoundingClientRect();
  if (top < 0 || top > 0.75 * innerHeight) panel.scrollIntoView({ block: "start" });
}
