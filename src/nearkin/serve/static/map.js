// The map: thousands of points on a canvas, moved and zoomed by mouse, touch and keyboard.
import { dark } from "/colours.js";

const CLOSEST = 400; // maximum zoom
const REACH = 14; // pixels around the pointer in which a point is selected
const PICTURES = 70; // with fewer points in view, they are drawn as pictures
const MARGIN = 30; // pixels around the whole map
const STRETCH = 2; // at most, of one axis against the other, to fill the panel: the axes of the map mean nothing
const ROOM = 14_000; // square pixels per class name
const SPREAD = 300; // names that are chosen far from each other, so that they cover the map
const TOGETHER = 0.03; // fraction of the map's width that holds half of a class worth naming; more if there are few
const NEAREST = 3; // hits that place an uploaded picture, as they place pictures that are not landmarks
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class IndexMap {
  constructor({ canvas, state, tip, spoken, pictureURL, colourOf, choose }) {
    Object.assign(this, { canvas, state, tip, spoken, pictureURL, colourOf, choose });
    this.context = canvas.getContext("2d");
    this.points = null;
    this.names = [];
    this.extent = { x0: 0, y0: 0, x1: 1, y1: 1 };
    this.view = { scale: 1, x: 0.5, y: 0.5 }; // pixels per unit, and the position in the middle
    this.stretch = 1; // vertical pixels per unit, relative to horizontal ones
    this.marked = { hits: new Set(), query: null, labels: new Set(), near: [] };
    this.drawn = { rows: [], side: 0 }; // points that are shown as pictures, the top one last
    this.pictures = new Map();
    this.pointers = new Map();
    this.hover = -1;
    this.awaited = 0;
    this.listen();
    new ResizeObserver(() => this.resize()).observe(canvas);
    dark.addEventListener("change", () => this.paint());
  }

  // ---- data

  async load(ask) {
    this.state.textContent = "Loading the map…";
    try {
      const found = await ask("/api/map");
      this.take(found);
      if (found.state === "drawing") setTimeout(() => this.load(ask), 1000);
    } catch (error) {
      this.state.textContent = `There is no map: ${error.message}`;
    }
  }

  take(found) {
    const old = this.points;
    const count = found.ids.length;
    if (!count) {
      this.state.textContent = "The index is empty.";
      return;
    }
    if (old && old.method === found.method) return this.describe(found);
    const byClass = new Map();
    found.label.forEach((label, row) => {
      if (!byClass.has(label)) byClass.set(label, []);
      byClass.get(label).push(row);
    });
    this.points = {
      method: found.method, ids: found.ids, labels: found.labels, label: found.label, byClass,
      x: Float32Array.from(found.x), y: Float32Array.from(found.y), row: new Map(found.ids.map((id, row) => [id, row])),
    };
    this.names = this.places(found, byClass);
    this.extent = this.bounds(found.ids.keys());
    this.fill();
    this.whole();
    if (old) this.glide(old);
    this.describe(found);
    this.canvas.setAttribute("aria-label", `Map of ${count.toLocaleString("en")} pictures`);
    this.seek();
  }

  places({ x, y, labels }, byClass) { // of class names: over the middle of each compact class
    const part = (values, portion) => values.sort((a, b) => a - b)[Math.floor(portion * (values.length - 1))];
    const together = Math.max(TOGETHER, 0.35 / Math.sqrt(byClass.size));
    const names = [];
    for (const [number, rows] of byClass) {
      if (number < 0) continue;
      const px = part(rows.map((row) => x[row]), 0.5);
      const py = part(rows.map((row) => y[row]), 0.5);
      const spread = part(rows.map((row) => Math.hypot(x[row] - px, y[row] - py)), 0.5);
      if (spread <= together) names.push({ name: labels[number], x: px, y: part(rows.map((row) => y[row]), 0.1), count: rows.length });
    }
    return this.spread(names.sort((a, b) => b.count - a.count));
  }

  spread(names) { // each name as far as possible from those before it
    const ordered = names.splice(0, 1);
    const away = names.map(() => Infinity);
    while (names.length && ordered.length < SPREAD) {
      const last = ordered[ordered.length - 1];
      let best = 0;
      names.forEach(({ x, y }, place) => {
        away[place] = Math.min(away[place], Math.hypot(x - last.x, y - last.y));
        if (away[place] > away[best]) best = place;
      });
      ordered.push(...names.splice(best, 1));
      away.splice(best, 1);
    }
    return [...ordered, ...names];
  }

  describe({ ids, total, state, method }) {
    const shown = ids.length < total ? `${ids.length.toLocaleString("en")} of ${total.toLocaleString("en")} pictures` : `${total.toLocaleString("en")} pictures`;
    this.state.textContent = state === "drawing" ? `${shown}, a first map; a better one is being drawn…` : `${shown} by ${method}`;
  }

  glide(old) { // from the first map to the final one
    const { x, y } = this.points;
    if (still.matches) return this.paint();
    const from = { x: old.x, y: old.y };
    const to = { x: x.slice(), y: y.slice() };
    const start = performance.now();
    const step = (time) => {
      const part = Math.min(1, (time - start) / 700);
      const eased = part * part * (3 - 2 * part);
      for (let row = 0; row < x.length; row += 1) {
        x[row] = from.x[row] + eased * (to.x[row] - from.x[row]);
        y[row] = from.y[row] + eased * (to.y[row] - from.y[row]);
      }
      this.paint();
      if (part < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  show({ hits, query, labels, near = [] }) { // `near`: the hits of an uploaded picture, best first
    this.marked = { hits: new Set(hits), query, labels: new Set(labels), near };
    this.seek();
  }

  spot() { // the place of an uploaded picture: between its nearest pictures, closer to the more similar ones
    const near = this.marked.near.filter(({ id }) => this.points.row.has(id)).slice(0, NEAREST);
    const sum = { x: 0, y: 0, weight: 0 };
    for (const { id, similarity } of near) {
      const row = this.points.row.get(id);
      const weight = 1 / Math.max(1e-3, Math.sqrt(Math.max(0, 2 - 2 * similarity)));
      sum.x += weight * this.points.x[row];
      sum.y += weight * this.points.y[row];
      sum.weight += weight;
    }
    return near.length ? { x: sum.x / sum.weight, y: sum.y / sum.weight } : null;
  }

  seek() { // bring the hits into view if they are not
    if (this.points && this.marked.hits.size) {
      const rows = this.markedRows();
      const box = this.bounds(rows);
      const [left, top] = this.at(box.x0, box.y0);
      const [right, bottom] = this.at(box.x1, box.y1);
      const inside = left >= 0 && top >= 0 && right <= this.width && bottom <= this.height;
      if (!inside) this.fit(box, 90);
    }
    this.paint();
  }

  markedRows() {
    const rows = [...this.marked.hits, this.marked.query].map((id) => this.points.row.get(id));
    return rows.filter((row) => row !== undefined);
  }

  bounds(rows) {
    const { x, y } = this.points;
    const box = { x0: Infinity, y0: Infinity, x1: -Infinity, y1: -Infinity };
    for (const row of rows) {
      box.x0 = Math.min(box.x0, x[row]); box.x1 = Math.max(box.x1, x[row]);
      box.y0 = Math.min(box.y0, y[row]); box.y1 = Math.max(box.y1, y[row]);
    }
    return box;
  }

  // ---- the view

  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    if (!clientWidth || !clientHeight) return;
    const ratio = window.devicePixelRatio || 1;
    const first = !this.width;
    Object.assign(this, { width: clientWidth, height: clientHeight });
    this.canvas.width = Math.round(clientWidth * ratio);
    this.canvas.height = Math.round(clientHeight * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.fill();
    if (first) this.whole();
    else this.paint();
  }

  fill() { // stretch one axis so that the whole map fills the panel
    if (!this.width) return;
    const { x0, y0, x1, y1 } = this.extent;
    const wide = (this.width - 2 * MARGIN) / Math.max(x1 - x0, 1e-3);
    const tall = (this.height - 2 * MARGIN) / Math.max(y1 - y0, 1e-3);
    this.stretch = Math.max(1 / STRETCH, Math.min(STRETCH, tall / wide));
  }

  scaleFor(box, margin) { // the scale at which a box fits
    const wide = (this.width - 2 * margin) / Math.max(box.x1 - box.x0, 1e-3);
    const tall = (this.height - 2 * margin) / Math.max(box.y1 - box.y0, 1e-3) / this.stretch;
    return Math.max(1, Math.min(wide, tall));
  }

  get least() {
    return this.scaleFor(this.extent, MARGIN);
  }

  whole() {
    this.fit(this.extent, MARGIN);
    this.paint();
  }

  fit(box, margin) {
    if (!this.width) return;
    const scale = Math.max(this.least, Math.min(this.scaleFor(box, margin), this.least * CLOSEST));
    this.view = { scale, x: (box.x0 + box.x1) / 2, y: (box.y0 + box.y1) / 2 };
  }

  closer(factor) { // zoom, and bring the query or its best hit to the middle on the way in
    const target = this.points && this.target();
    if (target && factor > 1) {
      this.view.x = target.x + (this.view.x - target.x) / factor ** 2; // on the screen its way to the middle shrinks by the factor
      this.view.y = target.y + (this.view.y - target.y) / factor ** 2;
    }
    this.zoom(factor);
  }

  target() {
    if (this.marked.near.length) return this.spot();
    const rows = this.markedRows();
    if (!rows.length) return null;
    const row = this.points.row.get(this.marked.query) ?? rows[0];
    return { x: this.points.x[row], y: this.points.y[row] };
  }

  at(x, y) {
    const { scale } = this.view;
    return [(x - this.view.x) * scale + this.width / 2, (y - this.view.y) * scale * this.stretch + this.height / 2];
  }

  zoom(factor, px = this.width / 2, py = this.height / 2) {
    const scale = Math.max(this.least * 0.5, Math.min(this.least * CLOSEST, this.view.scale * factor));
    const x = this.view.x + (px - this.width / 2) / this.view.scale;
    const y = this.view.y + (py - this.height / 2) / this.view.scale / this.stretch;
    this.view = { scale, x: x - (px - this.width / 2) / scale, y: y - (py - this.height / 2) / scale / this.stretch };
    this.keepNear();
  }

  move(dx, dy) {
    this.view.x -= dx / this.view.scale;
    this.view.y -= dy / this.view.scale / this.stretch;
    this.keepNear();
  }

  keepNear() { // the map cannot leave the view
    this.view.x = Math.max(-0.05, Math.min(1.05, this.view.x));
    this.view.y = Math.max(-0.05, Math.min(1.05, this.view.y));
    this.tip.hidden = true;
    this.paint();
  }

  pick(px, py, reach) { // the picture under the pointer, else the point nearest to it
    const { rows, side } = this.drawn;
    const under = rows.findLast((row) => {
      const [x, y] = this.at(this.points.x[row], this.points.y[row]);
      return Math.abs(x - px) <= side / 2 && Math.abs(y - py) <= side / 2;
    });
    return under ?? this.nearest(px, py, reach);
  }

  nearest(px, py, reach) {
    if (!this.points) return -1;
    const { x, y } = this.points;
    const { scale } = this.view;
    const cx = this.view.x + (px - this.width / 2) / scale;
    const cy = this.view.y + (py - this.height / 2) / scale / this.stretch;
    let best = -1;
    let least = (reach / scale) ** 2;
    for (let row = 0; row < x.length; row += 1) {
      const distance = (x[row] - cx) ** 2 + (this.stretch * (y[row] - cy)) ** 2;
      if (distance < least) [best, least] = [row, distance];
    }
    return best;
  }

  labelOf(row) {
    const number = this.points.label[row];
    return number < 0 ? null : this.points.labels[number];
  }

  // ---- painting

  paint() {
    if (this.awaited) return;
    this.awaited = requestAnimationFrame(() => {
      this.awaited = 0;
      this.draw();
    });
  }

  draw() {
    const { context, points, width, height } = this;
    if (!points || !width) return;
    context.clearRect(0, 0, width, height);
    const visible = this.visible();
    const asPictures = visible.length <= PICTURES && this.view.scale > 3 * this.least;
    const radius = Math.max(1.6, Math.min(7, 1.2 * Math.log2(1 + this.view.scale / this.least) + 60 / Math.sqrt(points.x.length)));
    const side = asPictures ? 48 * Math.min(1, this.view.scale / this.least / 6) : 0; // of pictures, smaller if crowded
    this.drawPoints(asPictures ? 3 : radius);
    this.drawn = { rows: [], side: 0 };
    if (asPictures) this.drawPictures(visible, side);
    this.drawMarks(radius, side);
    this.drawNames((side || 2 * radius) / 2 + 6, this.drawUpload());
    if (document.activeElement === this.canvas && this.byKey) this.drawCross();
  }

  visible() {
    const { x, y } = this.points;
    const halfWidth = (this.width / 2 + 30) / this.view.scale; // with a margin for points at the edge
    const halfHeight = (this.height / 2 + 30) / this.view.scale / this.stretch;
    const rows = [];
    for (let row = 0; row < x.length; row += 1) {
      if (Math.abs(x[row] - this.view.x) < halfWidth && Math.abs(y[row] - this.view.y) < halfHeight) rows.push(row);
    }
    return rows;
  }

  drawPoints(radius) {
    const { context, points, width, height } = this;
    const { labels, hits } = this.marked;
    const round = points.x.length <= 8000;
    for (const [number, rows] of points.byClass) {
      const label = number < 0 ? null : points.labels[number];
      context.fillStyle = this.colourOf(label);
      context.globalAlpha = labels.size && !labels.has(label) ? 0.12 : hits.size ? 0.5 : 0.85;
      context.beginPath();
      for (const row of rows) {
        const [px, py] = this.at(points.x[row], points.y[row]);
        if (px < -radius || py < -radius || px > width + radius || py > height + radius) continue;
        if (round) {
          context.moveTo(px + radius, py);
          context.arc(px, py, radius, 0, 2 * Math.PI);
        } else context.rect(px - radius, py - radius, 2 * radius, 2 * radius);
      }
      context.fill();
    }
    context.globalAlpha = 1;
  }

  drawPictures(rows, side) {
    const { context, points } = this;
    const found = (row) => Number(this.marked.hits.has(points.ids[row]));
    context.lineWidth = 4;
    context.strokeStyle = getComputedStyle(this.canvas).color;
    this.drawn = { rows: rows.sort((a, b) => found(a) - found(b)), side: side + 5 };
    for (const row of rows) { // hits on top, with a rim
      const image = this.picture(points.ids[row]);
      const [px, py] = this.at(points.x[row], points.y[row]);
      context.fillStyle = this.colourOf(this.labelOf(row));
      this.outline(px, py, 0, side + 5);
      if (found(row)) context.stroke();
      context.fill();
      if (!image.complete || !image.naturalWidth) continue; // loading or missing: keep the colour
      const short = Math.min(image.naturalWidth, image.naturalHeight);
      context.imageSmoothingEnabled = short > 100;
      context.drawImage(image, (image.naturalWidth - short) / 2, (image.naturalHeight - short) / 2, short, short, px - side / 2, py - side / 2, side, side);
    }
  }

  outline(px, py, radius, side) { // of a point, or of a picture if `side` is set
    this.context.beginPath();
    if (side) this.context.roundRect(px - side / 2, py - side / 2, side, side, 7);
    else this.context.arc(px, py, radius, 0, 2 * Math.PI);
  }

  picture(id) {
    let image = this.pictures.get(id);
    if (image) return image;
    image = new Image();
    image.onload = () => this.paint();
    image.src = this.pictureURL(id, 64);
    this.pictures.set(id, image);
    if (this.pictures.size > 600) this.pictures.delete(this.pictures.keys().next().value);
    return image;
  }

  drawMarks(radius, side) { // hits in full colour with a rim, the query with a wide one
    const { context, points } = this;
    const ink = getComputedStyle(this.canvas).color;
    const mark = (row, more, line, colour) => {
      const [px, py] = this.at(points.x[row], points.y[row]);
      this.outline(px, py, radius + more, side && side + 2 * more + 5);
      context.fillStyle = this.colourOf(this.labelOf(row));
      if (!side) context.fill();
      context.lineWidth = line;
      context.strokeStyle = colour;
      context.stroke();
    };
    for (const id of side ? [] : this.marked.hits) {
      const row = points.row.get(id);
      if (row !== undefined) mark(row, 1, 1.5, ink);
    }
    const query = points.row.get(this.marked.query);
    if (query !== undefined) mark(query, 4, 4, ink);
    if (this.hover >= 0) mark(this.hover, 3, 2.5, ink);
  }

  drawUpload() { // a diamond where an uploaded picture belongs; the boxes it covers
    const spot = this.marked.near.length ? this.spot() : null;
    if (!spot) return [];
    const { context } = this;
    const [px, py] = this.at(spot.x, spot.y);
    const style = getComputedStyle(this.canvas);
    context.beginPath();
    for (const [dx, dy] of [[0, -11], [11, 0], [0, 11], [-11, 0]]) context.lineTo(px + dx, py + dy);
    context.closePath();
    context.lineWidth = 3;
    context.lineJoin = "miter";
    context.strokeStyle = style.color;
    context.fillStyle = style.getPropertyValue("--accent");
    context.fill();
    context.stroke();
    this.penForNames(700);
    const half = context.measureText("your picture").width / 2 + 4;
    const x = Math.max(half, Math.min(this.width - half, px));
    const below = py + 30 < this.height ? py + 27 : py - 18;
    this.write("your picture", x, below);
    return [{ x, half, top: below - 14, bottom: below + 5 }, { x: px, half: 13, top: py - 13, bottom: py + 13 }];
  }

  penForNames(weight) {
    const { context } = this;
    context.font = `${weight} 12px system-ui, sans-serif`;
    context.textAlign = "center";
    context.lineJoin = "round";
    context.lineWidth = 3.5;
    context.strokeStyle = getComputedStyle(this.canvas.parentElement).backgroundColor;
    context.fillStyle = getComputedStyle(this.canvas).color;
  }

  write(text, x, y) {
    this.context.strokeText(text, x, y);
    this.context.fillText(text, x, y);
  }

  drawNames(above, taken) { // as many as there is room for, without overlaps; classes of hits first
    const { context, width, height } = this;
    const { labels, hits } = this.marked;
    const found = new Set([...hits].map((id) => this.points.row.get(id)).filter((row) => row !== undefined).map((row) => this.labelOf(row)));
    const inView = this.names.filter(({ name, x, y }) => {
      const [px, py] = this.at(x, y);
      return px > 0 && py > 0 && px < width && py < height && (!labels.size || labels.has(name));
    });
    const most = (width * height) / ROOM;
    const long = inView.length > most ? 24 : 34; // letters
    this.penForNames(500);
    const boxes = [...taken, { x: width - 34, half: 34, top: 0, bottom: 160 }, { x: 120, half: 120, top: height - 36, bottom: height }]; // buttons, state
    let count = 0;
    for (const { name, x, y } of [...inView.filter(({ name }) => found.has(name)), ...inView.filter(({ name }) => !found.has(name))]) {
      if (count >= most) return;
      const [px, py] = this.at(x, y);
      const text = name.length > long ? `${name.slice(0, long - 7)}…${name.slice(-6)}` : name; // the end often tells classes apart
      const half = context.measureText(text).width / 2 + 6;
      const box = { x: px, half, top: py - above - 16, bottom: py - above + 6 };
      const crosses = (other) => Math.abs(other.x - px) < other.half + half && box.top < other.bottom && box.bottom > other.top;
      if (px < half || px + half > width || box.top < 2 || boxes.some(crosses)) continue;
      boxes.push(box);
      this.write(text, px, box.bottom - 6);
      count += 1;
    }
  }

  drawCross() {
    const { context, width, height } = this;
    context.strokeStyle = getComputedStyle(this.canvas).color;
    context.lineWidth = 1.5;
    context.beginPath();
    for (const [dx, dy] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
      context.moveTo(width / 2 + 5 * dx, height / 2 + 5 * dy);
      context.lineTo(width / 2 + 15 * dx, height / 2 + 15 * dy);
    }
    context.stroke();
  }

  // ---- mouse, touch, keyboard

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 30 : 1; // lines or pixels
      this.zoom(Math.exp(-0.0018 * unit * event.deltaY), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => {
      this.byKey = canvas.matches(":focus-visible");
      this.speak();
      this.paint();
    });
    canvas.addEventListener("blur", () => this.point(-1));
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.byKey = false;
    if (!this.pointers.size) this.travelled = 0;
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
  }

  moved(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return event.pointerType === "mouse" ? this.point(this.pick(event.offsetX, event.offsetY, REACH)) : undefined;
    const here = { x: event.offsetX, y: event.offsetY };
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    this.pointers.set(event.pointerId, here);
    this.travelled += Math.hypot(here.x - before.x, here.y - before.y);
    if (this.travelled < 5) return undefined;
    this.canvas.classList.add("moving");
    if (!other) return this.move(here.x - before.x, here.y - before.y);
    this.travelled = Infinity; // two fingers never select a point
    const apart = (a, b) => Math.hypot(a.x - b.x, a.y - b.y);
    this.move((here.x - before.x) / 2, (here.y - before.y) / 2);
    return this.zoom(apart(here, other) / Math.max(1, apart(before, other)), (here.x + other.x) / 2, (here.y + other.y) / 2);
  }

  up(event) {
    const known = this.pointers.delete(event.pointerId);
    this.canvas.classList.remove("moving");
    if (!known || this.pointers.size || this.travelled >= 5) return;
    const row = this.pick(event.offsetX, event.offsetY, event.pointerType === "mouse" ? REACH : 2 * REACH);
    if (row >= 0) this.choose(this.points.ids[row]);
  }

  point(row) {
    this.canvas.classList.toggle("pointing", row >= 0);
    if (row === this.hover) return;
    this.hover = row;
    this.tip.hidden = row < 0;
    if (row >= 0) {
      const [px, py] = this.at(this.points.x[row], this.points.y[row]);
      const image = this.tip.querySelector("img");
      image.onload = () => image.classList.toggle("tiny", image.naturalWidth < 100);
      image.src = this.pictureURL(this.points.ids[row], 256);
      this.tip.querySelector("span").textContent = this.labelOf(row) ?? "no label";
      this.tip.style.left = `${px + 160 > this.width ? Math.max(4, px - 144) : px + 16}px`;
      this.tip.style.top = `${Math.max(4, Math.min(py - 40, this.height - 190))}px`;
    }
    this.paint();
  }

  key(event) {
    const far = 60;
    const does = {
      ArrowLeft: () => this.move(far, 0), ArrowRight: () => this.move(-far, 0), ArrowUp: () => this.move(0, far), ArrowDown: () => this.move(0, -far),
      "+": () => this.zoom(1.4), "=": () => this.zoom(1.4), "-": () => this.zoom(1 / 1.4), 0: () => this.whole(), Escape: () => this.whole(),
      Enter: () => this.hover >= 0 && this.choose(this.points.ids[this.hover]),
    }[event.key];
    if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.byKey = true;
    does();
    this.speak();
  }

  speak() { // announce the point in the middle, for keyboard users
    if (!this.byKey || !this.points) return;
    this.hover = -2;
    this.point(this.nearest(this.width / 2, this.height / 2, 80));
    this.spoken.textContent = this.hover < 0 ? "No picture is near the middle." : `${this.labelOf(this.hover) ?? "no label"}; Enter searches with it.`;
  }
}
