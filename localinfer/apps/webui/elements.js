// Elements and words. Nothing here or below makes markup of text: all text goes in as text.
'use strict';

/** An element with properties, or attributes where it has no such property, and children. */
function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const byId = (id) => document.getElementById(id);
const grouped = (number) => Math.round(number).toLocaleString('en-US');
const button = (label, action, properties = {}) =>
  element('button', { type: 'button', textContent: label, onclick: action, ...properties });

/** 24 hexadecimal digits; the browser's own identifiers are not there on pages without TLS. */
function makeId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}
