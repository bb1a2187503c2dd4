//! The bill of materials of a release: CycloneDX 1.5 in JSON.
//!
//! It lists every crate that the programs and libraries of an archive link, with licence, package
//! URL and the checksum in Cargo.lock, and which crate needs which. `cargo metadata` resolves the
//! features of the whole workspace, so an optional crate may be listed that a product does without.
//! Macros run in the compiler and are left out. The written text is read back and judged by the
//! library.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use cyclonedx_bom::external_models::date_time::DateTime;
use cyclonedx_bom::external_models::normalized_string::NormalizedString;
use cyclonedx_bom::external_models::spdx::SpdxExpression;
use cyclonedx_bom::external_models::uri::Purl;
use cyclonedx_bom::models::component::{Classification, Component, Components};
use cyclonedx_bom::models::dependency::{Dependencies, Dependency};
use cyclonedx_bom::models::hash::{Hash, HashAlgorithm, HashValue, Hashes};
use cyclonedx_bom::models::license::{LicenseChoice, Licenses};
use cyclonedx_bom::models::metadata::Metadata;
use cyclonedx_bom::models::property::{Properties, Property};
use cyclonedx_bom::prelude::{Bom, SpecVersion, Validate};
use serde_json::Value;

/// Writes the bill from the output of `cargo metadata` for `target`. `shipped` names the crates of
/// which the archive has programs or libraries. `time` is that of the release, in seconds since
/// 1970.
pub(crate) fn write(
    metadata: &str,
    lock: &Path,
    shipped: &[&str],
    target: &str,
    time: &str,
    file: &Path,
) -> Result<()> {
    ensure!(!shipped.is_empty(), "no crate is named: add the crates of the products to the arguments");
    let lock = fs::read_to_string(lock).with_context(|| lock.display().to_string())?;
    let bill = bill(&serde_json::from_str(metadata)?, &checksums(&lock), shipped, target, &date(time.parse()?))?;
    let mut text = Vec::new();
    bill.output_as_json_v1_5(&mut text)?;
    let read = Bom::parse_from_json_v1_5(&text[..])?;
    let judgement = read.validate_version(SpecVersion::V1_5);
    ensure!(judgement.passed(), "the bill of materials is not valid: {judgement:?}");
    text.push(b'\n');
    fs::write(file, text).with_context(|| file.display().to_string())
}

/// Checksums of packages by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let value = |package: &str, key: &str| {
        let line = package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""));
        line.map(|text| text.trim_end_matches('"').to_string())
    };
    let packages = lock.split("[[package]]").skip(1);
    let named = packages.filter_map(|package| {
        Some(((value(package, "name")?, value(package, "version")?), value(package, "checksum")?))
    });
    named.collect()
}

/// A time as CycloneDX writes it.
fn date(seconds: i64) -> String {
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // The civil calendar in eras of 400 years, which begin with March.
    let shifted = days + 719_468;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let march = (5 * of_year + 2) / 153;
    let (month, day) = ((march + 2) % 12 + 1, of_year - (153 * march + 2) / 5 + 1);
    let year = year + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3_600, rest / 60 % 60, rest % 60)
}

/// A key of an object, as text.
fn text<'v>(value: &'v Value, key: &str) -> Result<&'v str> {
    value[key].as_str().with_context(|| format!("cargo metadata names no {key}"))
}

/// The items of an array.
fn items<'v>(value: &'v Value, key: &str) -> impl Iterator<Item = &'v Value> + use<'v> {
    value[key].as_array().into_iter().flatten()
}

/// Whether a dependency is linked: it is no build script's and no test's.
fn is_linked(dependency: &Value) -> bool {
    items(dependency, "dep_kinds").any(|kind| kind["kind"].is_null())
}

/// Whether a package is a macro, which runs in the compiler.
fn is_macro(package: &Value) -> bool {
    items(package, "targets").any(|target| items(target, "kind").any(|kind| kind == "proc-macro"))
}

/// The bill.
fn bill(
    metadata: &Value,
    checksums: &BTreeMap<(String, String), String>,
    shipped: &[&str],
    target: &str,
    time: &str,
) -> Result<Bom> {
    let packages: BTreeMap<&str, &Value> =
        items(metadata, "packages").map(|package| Ok((text(package, "id")?, package))).collect::<Result<_>>()?;
    let needs: BTreeMap<&str, Vec<&str>> = items(&metadata["resolve"], "nodes")
        .map(|node| {
            let linked = items(node, "deps").filter(|dependency| is_linked(dependency));
            let linked = linked.map(|dependency| text(dependency, "pkg")).collect::<Result<Vec<_>>>()?;
            let linked = linked.into_iter().filter(|id| packages.get(id).is_some_and(|package| !is_macro(package)));
            Ok((text(node, "id")?, linked.collect()))
        })
        .collect::<Result<_>>()?;
    let of_name = |name: &str| packages.iter().find(|(_, package)| package["name"] == name).map(|(id, _)| *id);
    let shipped = shipped.iter().map(|name| of_name(name).with_context(|| format!("there is no crate {name}")));
    let mut waiting: Vec<&str> = shipped.collect::<Result<_>>()?;
    let mut linked = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if linked.insert(id) {
            waiting.extend(needs.get(id).into_iter().flatten());
        }
    }
    // The name in the bill: without the folder of the sources, which an id of cargo contains.
    let name = |id: &str| -> Result<String> {
        let package = packages.get(id).context("a package without a name")?;
        Ok(format!("{}@{}", text(package, "name")?, text(package, "version")?))
    };
    let (mut components, mut dependencies) = (Vec::new(), Vec::new());
    for id in &linked {
        components.push(component(packages[id], name(id)?, checksums)?);
        let mut on = needs.get(id).into_iter().flatten().map(|id| name(id)).collect::<Result<Vec<_>>>()?;
        on.sort();
        dependencies.push(Dependency { dependency_ref: name(id)?, dependencies: on });
    }
    components.sort_by(|a, b| a.bom_ref.cmp(&b.bom_ref));
    dependencies.sort_by(|a, b| a.dependency_ref.cmp(&b.dependency_ref));
    let neap = of_name("neap").context("there is no crate neap")?;
    let version = text(packages[neap], "version")?;
    let mut product = Component::new(Classification::Application, "neap", version, Some("neap".to_string()));
    product.licenses = licences(packages[neap])?;
    let described = Metadata {
        timestamp: Some(DateTime::try_from(time.to_string())?),
        component: Some(product),
        properties: Some(Properties(vec![Property::new("neap:target", target)])),
        ..Metadata::default()
    };
    Ok(Bom {
        // A serial number would have to be random, or depend on the bill itself.
        serial_number: None,
        metadata: Some(described),
        components: Some(Components(components)),
        dependencies: Some(Dependencies(dependencies)),
        spec_version: SpecVersion::V1_5,
        ..Bom::default()
    })
}

/// The licence expression of a package, if it names one.
fn licences(package: &Value) -> Result<Option<Licenses>> {
    let Some(expression) = package["license"].as_str() else { return Ok(None) };
    // Some older manifests write a slash between alternatives.
    let expression = SpdxExpression::parse_lax(expression.to_string())
        .with_context(|| format!("{}: licence {expression}", package["name"]))?;
    Ok(Some(Licenses(vec![LicenseChoice::Expression(expression)])))
}

/// A crate as a component.
fn component(package: &Value, reference: String, checksums: &BTreeMap<(String, String), String>) -> Result<Component> {
    let (name, version) = (text(package, "name")?, text(package, "version")?);
    let mut component = Component::new(Classification::Library, name, version, Some(reference));
    component.licenses = licences(package)?;
    component.description = package["description"].as_str().map(|text| NormalizedString::new(text.trim()));
    component.purl = Some(Purl::new("cargo", name, version)?);
    let sum = checksums.get(&(name.to_string(), version.to_string()));
    component.hashes =
        sum.map(|sum| Hashes(vec![Hash { alg: HashAlgorithm::SHA_256, content: HashValue(sum.clone()) }]));
    Ok(component)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn package(name: &str, kind: &str) -> Value {
        json!({"id": format!("path+file:///somewhere/{name}#1.0.0"), "name": name, "version": "1.0.0",
            "license": "MIT/Apache-2.0", "description": "one\ntwo", "targets": [{"kind": [kind]}]})
    }

    fn node(name: &str, on: &[(&str, Value)]) -> Value {
        let id = |name: &str| format!("path+file:///somewhere/{name}#1.0.0");
        let on: Vec<Value> =
            on.iter().map(|(name, kind)| json!({"pkg": id(name), "dep_kinds": [{"kind": kind}]})).collect();
        json!({"id": id(name), "deps": on})
    }

    #[test]
    fn bill_lists_linked_crates_alone() {
        let names = ["neap", "neap-cli", "neap-malloc", "neap-mallctl", "neap-c", "linked", "tested", "built"];
        let mut packages: Vec<Value> = names.iter().map(|name| package(name, "lib")).collect();
        packages.push(package("expanded", "proc-macro"));
        let on =
            [("linked", Value::Null), ("tested", json!("dev")), ("built", json!("build")), ("expanded", Value::Null)];
        let mut nodes: Vec<Value> = names.iter().skip(1).map(|name| node(name, &[("neap", Value::Null)])).collect();
        nodes.push(node("neap", &on));
        let metadata = json!({"packages": packages, "resolve": {"nodes": nodes}}).to_string();
        let folder = std::env::temp_dir().join(format!("neap-bill-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (lock, file) = (folder.join("Cargo.lock"), folder.join("bill.json"));
        let sum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let locked = format!("[[package]]\nname = \"linked\"\nversion = \"1.0.0\"\nchecksum = \"{sum}\"\n");
        fs::write(&lock, locked).unwrap();
        let bill = |shipped: &[&str]| -> Result<Value> {
            write(&metadata, &lock, shipped, "some-target", "951782400", &file)?;
            Ok(serde_json::from_str(&fs::read_to_string(&file)?)?)
        };
        let named = |bill: &Value| -> Vec<String> {
            items(bill, "components").map(|component| component["name"].as_str().unwrap().to_string()).collect()
        };
        assert_eq!(named(&bill(&["neap-malloc"]).unwrap()), ["linked", "neap-malloc", "neap"]);
        assert!(bill(&[]).is_err() && bill(&["no-crate"]).is_err());
        let bill = bill(&["neap-cli", "neap-malloc", "neap-mallctl", "neap-c"]).unwrap();
        assert_eq!(named(&bill), ["linked", "neap-c", "neap-cli", "neap-mallctl", "neap-malloc", "neap"]);
        assert_eq!(bill["components"][0]["hashes"][0]["content"], sum);
        let of_neap = items(&bill, "dependencies").find(|entry| entry["ref"] == "neap@1.0.0").unwrap();
        assert_eq!(of_neap["dependsOn"], json!(["linked@1.0.0"]));
        assert_eq!(bill["metadata"]["timestamp"], "2000-02-29T00:00:00Z");
        assert!(
            !fs::read_to_string(&file).unwrap().contains("somewhere"),
            "the folder of the sources reaches the bill"
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
