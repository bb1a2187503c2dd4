//! Links and anchors of one page, in Markdown or in HTML.

use std::collections::{BTreeSet, HashMap};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// A link, or the source of an image.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// Line of the page, from 1.
    pub(crate) line: usize,
    /// The address as it is written.
    pub(crate) address: String,
}

/// The anchors and links of a page.
#[derive(Debug, Default)]
pub(crate) struct Page {
    /// Fragments that lead to a place on the page.
    pub(crate) anchors: BTreeSet<String>,
    pub(crate) links: Vec<Link>,
}

/// The anchor of a heading: lower case, a hyphen for each space, other punctuation left out.
fn slug(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || "_- ".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Reads a Markdown page.
pub(crate) fn markdown(text: &str) -> Page {
    let mut page = Page::default();
    let mut heading: Option<String> = None;
    let mut uses: HashMap<String, usize> = HashMap::new();
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let slug = slug(&heading.take().unwrap_or_default());
                let used = uses.entry(slug.clone()).or_default();
                page.anchors.insert(if *used == 0 { slug } else { format!("{slug}-{used}") });
                *used += 1;
            }
            Event::Text(part) | Event::Code(part) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&part);
                }
            }
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                let line = text[..range.start].matches('\n').count() + 1;
                page.links.push(Link { line, address: dest_url.into_string() });
            }
            _ => {}
        }
    }
    page
}

/// Values of an attribute in HTML, with the byte at which each begins.
fn attributes<'a>(text: &'a str, name: &str) -> Vec<(usize, &'a str)> {
    let key = format!(" {name}=\"");
    let starts = text.match_indices(&key).map(|(at, _)| at + key.len());
    starts.filter_map(|start| Some((start, text[start..].split_once('"')?.0))).collect()
}

/// Reads a page of HTML with quoted attributes, as the book's renderer writes it.
pub(crate) fn html(text: &str) -> Page {
    let anchors = attributes(text, "id").into_iter().map(|(_, id)| id.to_string()).collect();
    let mut links = Vec::new();
    for (start, address) in ["href", "src"].iter().flat_map(|name| attributes(text, name)) {
        links.push(Link { line: text[..start].matches('\n').count() + 1, address: address.to_string() });
    }
    Page { anchors, links }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_become_anchors_as_renderers_make_them() {
        let page = markdown("# Blocks of 2 MiB\n\n## `neap`'s own_caches, CPU-local\n\n## Again\n\n## Again\n");
        let expected = ["again", "again-1", "blocks-of-2-mib", "neaps-own_caches-cpu-local"];
        assert_eq!(page.anchors.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn links_and_images_are_found_outside_code() {
        let page = markdown("| a |\n|---|\n| [x](y.md) |\n\n![p](p.svg)\n`[no](no.md)`\n\n    [no](no.md)\n");
        let found: Vec<_> = page.links.iter().map(|link| (link.line, link.address.as_str())).collect();
        assert_eq!(found, [(3, "y.md"), (5, "p.svg")]);
    }

    #[test]
    fn attributes_of_html_are_found() {
        let page = html("<h1 id=\"a\"><a class=\"x\" href=\"b.html#c\">b</a></h1>\n<img src=\"p.svg\">");
        assert!(page.anchors.contains("a"));
        let found: Vec<_> = page.links.iter().map(|link| (link.line, link.address.as_str())).collect();
        assert_eq!(found, [(1, "b.html#c"), (2, "p.svg")]);
    }
}
