// Makes elements, and fills values into texts.
"use strict";

const find = (id) => document.getElementById(id);

// An element of HTML. Of its attributes "style" is CSS and "onclick" a function; false and null leave one out.
function element(tag, attributes = {}, ...children) {
  return setUp(document.createElement(tag), attributes, children);
}

function svgElement(tag, attributes = {}, ...children) {
  return setUp(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function setUp(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null) continue;
    if (name === "style") node.style.cssText = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// The text `key` of words.js, with its {names} filled in; a name without a value stays.
function textOf(words, key, values = {}) {
  const text = words[key];
  if (text === undefined) throw new Error(`no text for "${key}"`);
  return text.replace(/\{(\w+)\}/g, (name, inner) => (inner in values ? values[inner] : name));
}
