const TREE_ROWS_AT_FIRST = 16;
const LAYER_CHOICES = [
  ["all", say("All"), say("Every layer that can be checkpointed, also those within others")],
  ["none", say("None"), say("No layer")],
  ["blocks", say("Blocks"), ""],
  ["every_second", say("Every second"), ""],
];

/** Rows [name, type, parameters, why not] as nodes of a tree; the first is the model itself and is not shown. */
function tree(rows) {
  const root = { name: "", label: "", children: [], depth: 0, parent: null, position: -1 };
  const byName = new Map([["", root]]);
  for (const [position, [name, type, parameters, whyNot]] of rows.entries()) {
    const parts = name.split(".");
    let above = parts.length - 1;
    while (!byName.has(parts.slice(0, above).join("."))) above--;
    const parent = byName.get(parts.slice(0, above).join("."));
    const label = parts.slice(above).join(".");
    const node = { name, label, type, parameters, whyNot, position, parent, depth: parent.depth + 1, children: [] };
    parent.children.push(node);
    byName.set(name, node);
  }
  return root;
}

/** Whether a level of the tree is open at first: as many whole levels as leave it short. */
function openDepth(root) {
  let level = root.children;
  let total = level.length;
  let depth = 0;
  while (level.length) {
    const below = level.flatMap((node) => node.children);
    total += below.length;
    if (!below.length || total > TREE_ROWS_AT_FIRST) break;
    depth++;
    level = below;
  }
  return depth;
}

export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, say("Checkpointed layers"), "ampw-layers");
    const summary = h("span", { class: "ampw-dim" });
    heading.append(summary);
    const choices = h("div", { class: "ampw-buttons", role: "group", "aria-label": say("Choose layers") });
    const buttons = LAYER_CHOICES.map(([choice, label, title]) =>
      h("button", { type: "button", "data-choice": choice, title, onclick: () => asked.ask({ choose: choice }) }, h("span", {}, label)));
    choices.append(...buttons);
    const patternId = uid();
    const pattern = h("input", {
      type: "text", id: patternId, placeholder: "layers.*", autocomplete: "off", spellcheck: "false",
      title: say("Names of layers, or patterns: * stands for one part of a dotted name, ** for any number of parts. Several with spaces between."),
      onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) applyPattern(); },
    });
    const applyPattern = () => { if (pattern.value.trim()) asked.ask({ pattern: pattern.value }); };
    const apply = h("button", { type: "button", onclick: applyPattern }, h("span", {}, say("Apply")));
    const list = h("ul", { class: "ampw-tree", role: "tree", "aria-labelledby": titleId, "aria-multiselectable": "true" });
    body.append(choices, h("div", { class: "ampw-pattern" }, h("label", { for: patternId }, say("Pattern")), pattern, apply), list);

    let rows = null;
    let building = false;
    let root = null;
    let place = null; // the node whose row takes part in the tab order
    let ticked = new Set();
    let inForce = new Set();
    const nodes = new Map(); // list item → node, of those that have a row in the page

    const build = () => {
      building = true;
      nodes.clear();
      list.replaceChildren();
      root = tree(rows);
      place = root.children[0] ?? null;
      const depth = openDepth(root);
      addRows(root, list);
      list.classList.toggle("ampw-flat", root.children.every((node) => !node.children.length)); // no room for twisties needed
      const openDown = (node) => {
        for (const child of node.children) {
          if (child.depth > depth || !child.children.length) continue;
          setOpen(child, true);
          openDown(child);
        }
      };
      openDown(root);
      building = false;
    };

    const addRows = (parent, into) => {
      into.append(...parent.children.map(row));
      parent.filled = true;
    };

    const row = (node) => {
      const group = node.children.length > 0;
      node.box = h("input", {
        type: "checkbox", disabled: node.whyNot !== "", tabindex: "-1",
        onchange: () => asked.ask({ layer: node.name, on: node.box.checked }, { [node.name]: node.box.checked }),
      });
      node.count = h("span", { class: "ampw-count", hidden: true });
      node.twisty = h("button", { type: "button", class: "ampw-twisty", tabindex: "-1", "aria-hidden": "true", hidden: !group, onclick: () => { setOpen(node, !node.open); go(node); } });
      const whyId = uid();
      const label = h("label", { title: `${node.name}: ${node.type}` }, node.box, h("span", { class: "ampw-name" }, node.label), h("span", { class: "ampw-type" }, node.type));
      node.line = h("div", { class: "ampw-row", style: `--ampw-depth: ${node.depth - 1}` }, node.twisty, label, node.count,
        h("span", { class: "ampw-parameters", title: say("{count} parameters", { count: node.parameters }) }, node.parameters));
      node.item = h("li", { role: "treeitem", "aria-level": node.depth, "aria-expanded": group ? "false" : null, "aria-label": itemLabel(node),
        "aria-describedby": node.whyNot ? whyId : null }, node.line);
      if (node.whyNot) node.line.append(h("span", { class: "ampw-why", id: whyId, title: node.whyNot }, node.whyNot));
      if (group) {
        node.group = h("ul", { role: "group", hidden: true });
        node.item.append(node.group);
      }
      target(node).tabIndex = node === place ? 0 : -1;
      nodes.set(node.item, node);
      return node.item;
    };

    const itemLabel = (node) => say("{name}, {type}, {count} parameters", { name: node.name, type: node.type, count: node.parameters });
    const target = (node) => (node.box.disabled ? node.item : node.box); // what takes the focus in a row

    const setOpen = (node, open) => {
      if (!node.group || node.open === open) return;
      node.open = open;
      if (!node.filled) addRows(node, node.group);
      node.group.hidden = !open;
      node.item.setAttribute("aria-expanded", String(open));
      if (!building) drawTicks();
    };

    const go = (node) => {
      if (!node || !node.item) return;
      if (place) target(place).tabIndex = -1;
      place = node;
      target(node).tabIndex = 0;
      target(node).focus();
      node.line.scrollIntoView({ block: "nearest" });
    };

    const visible = () => {
      const found = [];
      const walk = (node) => { for (const child of node.children) { found.push(child); if (child.open) walk(child); } };
      walk(root);
      return found;
    };

    const nodeOf = (element) => nodes.get(element.closest("li"));

    list.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
      const node = nodeOf(event.target);
      if (!node) return;
      const all = visible();
      const at = all.indexOf(node);
      const moves = {
        ArrowDown: () => go(all[at + 1]),
        ArrowUp: () => go(all[at - 1]),
        Home: () => go(all[0]),
        End: () => go(all.at(-1)),
        ArrowRight: () => (node.group && !node.open ? setOpen(node, true) : go(node.children[0])),
        ArrowLeft: () => (node.open ? setOpen(node, false) : node.parent !== root && go(node.parent)),
      };
      if (!moves[event.key]) return;
      event.preventDefault();
      moves[event.key]();
    });
    list.addEventListener("focusin", (event) => {
      const node = nodeOf(event.target);
      if (!node || node === place) return;
      if (place) target(place).tabIndex = -1;
      place = node;
      target(node).tabIndex = 0;
    });

    const drawTicks = () => {
      const within = new Map(); // ticked layers within each group
      const count = (node) => {
        let sum = 0;
        for (const child of node.children) sum += (ticked.has(child.position) ? 1 : 0) + count(child);
        within.set(node, sum);
        return sum;
      };
      count(root);
      const locked = asked.locked();
      for (const node of nodes.values()) {
        const on = asked.value(node.name, ticked.has(node.position));
        const changed = on !== inForce.has(node.position);
        const disabled = locked || node.whyNot !== "";
        node.box.checked = on;
        if (node.item.getAttribute("aria-checked") !== String(on)) node.item.setAttribute("aria-checked", String(on));
        if (node.box.disabled !== disabled) {
          target(node).tabIndex = -1;
          node.box.disabled = disabled;
          target(node).tabIndex = node === place ? 0 : -1; // where nothing can be ticked, rows are still read
        }
        node.line.classList.toggle("ampw-changed", changed);
        if (!node.group) continue;
        const inside = within.get(node);
        setText(node.count, inside && !node.open ? String(inside) : "");
        node.count.title = inside ? say("{count} of the layers within", { count: inside }) : "";
      }
    };

    const draw = () => {
      ticked = new Set(model.get("requested"));
      inForce = new Set(model.get("in_force"));
      if (rows !== model.get("rows")) {
        rows = model.get("rows");
        build();
      }
      drawTicks();
      setText(summary, model.get("summary"));
      const locked = asked.locked();
      const blocks = model.get("blocks");
      for (const button of buttons) {
        const needsBlocks = ["blocks", "every_second"].includes(button.dataset.choice);
        setOff(button, locked || (needsBlocks && !blocks));
        if (needsBlocks) button.title = blocks ? (button.dataset.choice === "blocks" ? say("The repeated blocks: {blocks}", { blocks }) : say("Every second of the repeated blocks: {blocks}", { blocks })) : say("This model has no repeated blocks");
      }
      setOff(apply, locked);
      pattern.disabled = locked;
      const differs = ticked.size !== inForce.size || [...ticked].some((position) => !inForce.has(position));
      setWaiting(differs || asked.waits());
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      remove();
      asked.remove();
    };
  },
};
