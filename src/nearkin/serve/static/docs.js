// The API as a page, from openapi.json.
const make = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

const row = (name, text) => make("tr", {}, make("th", {}, make("code", {}, name)), make("td", {}, text));

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  return schema.type === "array" ? `list of ${typeOf(schema.items)}` : schema.type ?? "";
}

function parameter({ name, required, schema, description }) {
  const type = typeOf(schema);
  const range = schema.maximum === undefined ? "" : `, ${schema.minimum} to ${schema.maximum}`;
  const fallback = schema.default === undefined ? "" : `, default ${schema.default}`;
  return row(name, `${description ?? ""} (${type}${range}${required ? ", required" : fallback})`);
}

function example(method, path, parameters) {
  const needed = (parameters ?? []).filter(({ required }) => required).map(({ name }) => `${name}=…`);
  const address = `${location.origin}${path}${needed.length ? `?${needed.join("&")}` : ""}`;
  return method === "post" ? `curl --data-binary @picture.jpg -H 'Content-Type: image/jpeg' '${address}'` : `curl '${address}'`;
}

function article(path, method, operation) {
  const title = make("h2", {}, make("span", { class: "method" }, method.toUpperCase()), make("code", {}, path));
  const answer = operation.responses["200"]?.content ?? {};
  const type = typeOf(answer["application/json"]?.schema) || Object.keys(answer).join(" or ");
  const problems = Object.entries(operation.responses).filter(([code]) => code !== "200");
  return make("article", {}, title, `${operation.summary}. Answer: `, make("code", {}, type),
    make("pre", {}, example(method, path, operation.parameters)),
    make("table", {}, ...(operation.parameters ?? []).map(parameter), ...problems.map(([code, { description }]) => row(code, description))));
}

function schema(name, { description, properties }) {
  const fields = Object.entries(properties ?? {}).map(([field, about]) => row(field, `${typeOf(about)}${about.description ? `: ${about.description}` : ""}`));
  return make("article", {}, make("h2", {}, make("code", {}, name)), description ?? "", make("table", {}, ...fields));
}

const intro = document.getElementById("intro");
try {
  const known = await (await fetch("/openapi.json")).json();
  intro.textContent = `${known.info.description} Version ${known.info.version}. If the server has a token, send it in the header “Authorization: Bearer TOKEN”. Errors are {"error": "a sentence"}.`;
  const operations = Object.entries(known.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => article(path, method, operation)));
  const schemas = Object.entries(known.components.schemas).map(([name, about]) => schema(name, about));
  document.getElementById("paths").replaceChildren(...operations, make("h1", {}, "Answers"), ...schemas);
} catch {
  intro.textContent = "The description could not be loaded: is the server still running?";
}
