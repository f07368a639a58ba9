//! The book's queries in PromQL, on the series that there are.

use std::collections::BTreeSet;

use gpumux_dra::metrics;
use promql_parser::{
    parser::{self, Expr},
    util::{ExprVisitor, walk_expr},
};
use serde_json::Value;

use crate::chart::documents;

/// The series that a query reads.
#[derive(Default)]
struct Names(BTreeSet<String>);

impl ExprVisitor for Names {
    type Error = ();

    fn pre_visit(&mut self, expression: &Expr) -> Result<bool, ()> {
        match expression {
            Expr::VectorSelector(selector) => self.0.extend(selector.name.clone()),
            Expr::MatrixSelector(selector) => self.0.extend(selector.vs.name.clone()),
            _ => {}
        }
        Ok(true)
    }
}

/// The fenced blocks of the chapter on Kubernetes in a language.
fn blocks(language: &str) -> Vec<&'static str> {
    let text = include_str!("../../../../docs/kubernetes.md");
    let fence = format!("```{language}\n");
    let blocks = text.split(fence.as_str()).skip(1);
    blocks
        .map(|rest| rest.split("```").next().unwrap())
        .collect()
}

/// Everything under this key somewhere in an object.
pub(crate) fn under<'a>(object: &'a Value, key: &str) -> Vec<&'a str> {
    match object {
        Value::Object(map) => {
            let own = map.get(key).and_then(Value::as_str);
            own.into_iter()
                .chain(map.values().flat_map(|value| under(value, key)))
                .collect()
        }
        Value::Array(items) => items.iter().flat_map(|item| under(item, key)).collect(),
        _ => Vec::new(),
    }
}

/// The families of a scrape.
pub(crate) fn types(text: &str) -> BTreeSet<&str> {
    text.lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect()
}

#[test]
fn the_books_queries_are_promql_on_series_that_there_are() {
    let text = metrics::render(&metrics::Facts::default());
    let there = types(&text);
    let objects: Vec<_> = blocks("yaml").into_iter().flat_map(documents).collect();
    let mut queries: Vec<String> = blocks("promql").into_iter().map(str::to_owned).collect();
    for key in ["query", "metricsQuery", "seriesQuery"] {
        queries.extend(
            objects
                .iter()
                .flat_map(|object| under(object, key))
                .map(str::to_owned),
        );
    }
    assert_eq!(queries.len(), 5);
    for query in queries {
        for name in series(&query) {
            assert!(there.contains(name.as_str()), "{query}: there is no {name}");
        }
    }
}

/// The series that a query in PromQL reads.
pub(crate) fn series(query: &str) -> BTreeSet<String> {
    // What the adapter for Prometheus puts there.
    let query = query
        .replace("<<.LabelMatchers>>", r#"namespace="prod""#)
        .replace("<<.GroupBy>>", "pod");
    let parsed = parser::parse(&query).unwrap_or_else(|error| panic!("{query}: {error}"));
    let mut names = Names::default();
    walk_expr(&mut names, &parsed).unwrap();
    assert!(!names.0.is_empty(), "{query}");
    names.0.into_iter().collect()
}
